"""Telemetry: curves and progress from output, the metrics file and event files, all of which may be hostile."""

import json
import os
import shutil
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs import reconciliation, selectors, telemetry
from jobs.models import Job, MetricPoint
from jobs.points import add_epoch, count_finished_epochs, next_position
from runtime.errors import BackendUnavailable
from runtime.specs import Outcome
from tests.jobs import event_files


@pytest.fixture
def attempt(customer):
    """The running attempt of a job of 10 epochs on two nodes."""
    return customer.started()


@pytest.fixture
def folder(attempt, backend):
    """The folder in which the code writes the metrics file and event files."""
    return backend.run_folder(attempt.run_name) / "run"


def fail(*_arguments):
    raise BackendUnavailable("no route")


def record(folder, *lines):
    """Append lines to the metrics file: bytes as they are, other values as JSON."""
    with (folder / "metrics.jsonl").open("ab") as file:
        for line in lines:
            file.write(line if isinstance(line, bytes) else (json.dumps(line) + "\n").encode())


def curves(attempt):
    """Read what the run has written since the last read; return all curves."""
    telemetry.ingest(attempt=attempt)
    return selectors.metrics(attempt.job)[0]


def job_of(attempt):
    return Job.objects.get(pk=attempt.job_id)


SPELLINGS = [
    ("epoch 3/8 step 120 loss 0.1234 accuracy 0.9612", 3, 120, {"loss": 0.1234, "accuracy": 0.9612}),
    ("Train Epoch: 2 [640/60000 (1%)]\tLoss: 2.300", 2, None, {"loss": 2.3}),
    ("Epoch [4/10], Step [200/600], Loss: 0.4", 4, 200, {"loss": 0.4}),
    ("Epoch 5 of 10 | val_loss=1e-3", 5, None, {"validation_loss": 0.001}),
    ("valid acc: 97.5%", None, None, {"validation_accuracy": 0.975}),
    ("Test set: Average loss: 0.0512", None, None, {"average_loss": 0.0512}),
    ("Test Accuracy: 0.9123", None, None, {"test_accuracy": 0.9123}),
    ("iter 10: train_loss -1.5", None, 10, {"train_loss": -1.5}), ("loss .5", None, None, {"loss": 0.5}),
    ("loss: nan accuracy: inf", None, None, {}), ("loss: 1e999", None, None, {}),
    ("lossless compression 3", None, None, {}), ("", None, None, {}), ("epoch " + "9" * 400, None, None, {}),
    ("\x1b[1;32mEpoch 2/3\x1b[0m loss: \x1b[33m0.5\x1b[0m", 2, None, {"loss": 0.5}),
    ("step " + "9" * 100 + " loss 1", None, None, {"loss": 1.0}),
]  # fmt: skip


def test_the_usual_spellings_are_read():
    for line, epoch, step, values in SPELLINGS:
        assert telemetry.parse_line(line) == (epoch, step, values), line
    for line in ("loss" + " " * 2000, "loss " * 400, "epoch" * 400, "9" * 2000, "test " * 400, "epoch 1e5 loss 1e-400"):
        telemetry.parse_line(line)  # an exponential pattern would not end


def test_lines_of_output_become_curves_and_progress(attempt, backend):
    backend.write(attempt.run_name, "epoch 1/10 loss 2.0\nepoch 2/10 loss 1.0\nnothing\nloss 0.5\rloss 0.25\r")
    # A carriage return ends a line too: progress bars write it instead of a newline.
    assert curves(attempt) == {"loss": [[1, 2.0], [2, 1.0], [3, 0.5], [4, 0.25]]}
    job = job_of(attempt)
    assert (job.epoch, job.progress) == (1, 0.1)  # the second epoch has only begun
    assert list(MetricPoint.objects.values_list("epoch", flat=True)) == [1.0, 2.0, 2.0, 2.0]
    assert telemetry.ingest(attempt=attempt) is False, "there is no new output"


def test_a_line_counts_once_it_is_complete_and_an_endless_one_is_not_stored(attempt, backend):
    for piece in ("epoch 1 lo", "ss 2.5", "0\nloss 1"):
        backend.write(attempt.run_name, piece)
        result = curves(attempt)
    assert result == {"loss": [[1, 2.5]]}
    backend.write(attempt.run_name, ".75\n" + "x" * 300_000)
    curves(attempt)
    attempt.refresh_from_db()
    assert len(json.dumps(attempt.cursor)) < 2 * telemetry.MAX_LINE_LENGTH
    backend.write(attempt.run_name, "\nloss 4")
    backend.end(attempt.run_name, Outcome.COMPLETED)
    telemetry.ingest_all(attempt=attempt)
    assert curves(attempt) == {"loss": [[1, 2.5], [2, 1.75], [3, 4.0]]}, "the end of the run ends a line"


def test_what_is_larger_than_one_read_is_read_in_pieces(attempt, folder, monkeypatch):
    monkeypatch.setattr(telemetry, "MAX_READ_BYTES", 1000)
    record(folder, b"x" * 5000 + b"\n", {"fine": 1, "step": 1})
    for _ in range(8):  # more often than 5000 bytes need
        result = curves(attempt)
    assert result == {"fine": [[1, 1.0]]}, "a huge line is skipped"


def test_the_end_of_a_run_does_not_wait_for_its_output_but_all_of_it_is_read(attempt, backend, monkeypatch, sent_tasks):
    monkeypatch.setattr(telemetry, "MAX_READ_BYTES", 1000)
    monkeypatch.setattr(telemetry, "FINAL_READ_SECONDS", -1.0)  # one read at a time
    backend.write(attempt.run_name, "".join(f"epoch {n // 50} step {n} loss {n}\n" for n in range(1, 501)))
    backend.end(attempt.run_name, Outcome.TIME_LIMIT)
    message = ("read_rest", attempt.pk)
    with monkeypatch.context() as patch:
        patch.setattr(reconciliation, "_observe", lambda *_arguments: 1 / 0)  # as if the worker is killed here
        with pytest.raises(ZeroDivisionError):
            reconciliation.reconcile_job(job_pk=attempt.job_id)
    reconciliation.reconcile_job(job_pk=attempt.job_id)
    assert job_of(attempt).is_ended
    assert 0 < MetricPoint.objects.count() < 100
    assert sent_tasks.count(message) == 1
    telemetry.read_rest(attempt.pk)
    assert sent_tasks.count(message) == 2, "each message reads for a short time"
    with monkeypatch.context() as patch:
        patch.setattr(backend, "describe", fail)
        telemetry.read_rest(attempt.pk)  # reads nothing now
    # That message is lost, too.
    reconciliation.delete_old_runs()
    assert sent_tasks.count(message) == 3, "a periodic task repeats it"
    monkeypatch.undo()
    telemetry.read_rest(attempt.pk)
    assert MetricPoint.objects.count() == 500
    assert job_of(attempt).epoch == 10, "a free estimate that reached its time limit is measured"
    reconciliation.delete_old_runs()
    assert sent_tasks.count(message) == 3, "nothing is left to read"


def test_the_metrics_file_is_read_from_where_the_last_read_ended(attempt, folder):
    record(folder, {"epoch": 1, "step": 10, "loss": 0.5, "time": 1700000000}, {"loss": 0.25})
    assert curves(attempt) == {"loss": [[10, 0.5], [11, 0.25]]}  # a record without a step comes one after the last
    record(folder, b'{"loss": 0.1')
    assert len(curves(attempt)["loss"]) == 2
    record(folder, b', "step": 11}\n')
    assert curves(attempt)["loss"][-1][1] == 0.1
    assert MetricPoint.objects.get(step=10).at.timestamp() == 1700000000
    assert job_of(attempt).epoch == 0  # the first epoch has only begun


def test_a_folder_that_the_code_replaced_by_a_link_is_not_read(customer, attempt, backend, folder):
    other_folder = backend.run_folder(customer.started().run_name) / "run"
    record(other_folder, {"secret": 1})
    event_files.write(other_folder / "tensorboard", event_files.scalar("secret", 1, 42))
    (folder / "tensorboard").symlink_to(other_folder / "tensorboard")
    assert curves(attempt) == {}
    shutil.rmtree(folder)
    folder.symlink_to(other_folder)
    assert curves(attempt) == {}


REPORTS = [(epoch, step, epoch + step / 100) for epoch in range(5) for step in range(24)]
"""Epoch, step and loss, as a script reports them that counts its steps anew in each epoch."""


@pytest.mark.parametrize("source", ["log", "metrics file without epochs", "TensorBoard"])
def test_a_script_that_restarts_its_step_count_keeps_every_point_in_order(attempt, backend, folder, source):
    """`test_curves` has the same for a metrics file with epochs."""
    if source == "TensorBoard":
        events = [event_files.scalar("loss", step, loss) for _epoch, step, loss in REPORTS]
        event_files.write(folder / "tensorboard", *events)
    for reports in (REPORTS[:70], REPORTS[70:]):  # the first of two reads ends within an epoch
        for epoch, step, loss in reports:
            if source == "log":
                backend.write(attempt.run_name, f"Epoch {epoch}/5 step {step} loss {loss}\n")
            elif source == "metrics file without epochs":
                record(folder, {"step": step, "loss": loss})
        points = curves(attempt)["loss"]
    assert [value for _step, value in points] == pytest.approx([loss for _epoch, _step, loss in REPORTS])
    assert len({step for step, _value in points}) == len(REPORTS)


def test_a_curve_in_several_sources_is_read_from_the_metrics_file(attempt, backend, folder):
    record(folder, {"step": 5, "loss": 0.5})
    event_files.write(folder / "tensorboard", event_files.scalar("loss", 5, 0.5))
    event_files.write(folder / "tensorboard" / "eval", event_files.scalar("loss", 1, 2.0))
    backend.write(attempt.run_name, "step 5 loss 9 accuracy 0.5\n")
    assert curves(attempt) == {"loss": [[5, 0.5]], "accuracy": [[5, 0.5]], "eval/loss": [[1, 2.0]]}


HOSTILE = [
    b"not json\n", b"[1, 2]\n", b'"text"\n', b"null\n", b"{\n", b'{"loss": NaN}\n', b'{"loss": Infinity}\n',
    b'{"loss": 1e999}\n', b'{"loss": true}\n', b'{"loss": "1"}\n', b'{"loss": {"a": 1}}\n', b'{"": 1}\n',
    b'{"a\\u0000b": 1}\n', b'{"\\ud800": 1}\n', b'{"<script>": 1}\n', b'{"loss": 1, "step": 1e299}\n',
    b"\xff\xfe\n", b'{"a": ' + b"[" * 100_000 + b"\n", b'{"loss": ' + b"9" * 5000 + b"}\n", b"\x00" * 1000 + b"\n",
    b'{"x' + b"y" * 200 + b'": 1}\n', b'{"' + b"n" * 100 + b'\\n": 1}\n', b'{"loss": 1, "step": -9007199254740993}\n',
]  # fmt: skip


def test_lines_that_are_no_records_are_skipped(attempt, folder):
    for step, line in enumerate(HOSTILE):
        record(folder, line, {"step": step, "fine": 1})
    assert curves(attempt) == {"fine": [[step, 1.0] for step in range(len(HOSTILE))]}


def test_an_impossible_time_is_replaced_by_now_and_an_epoch_is_bounded_and_never_goes_back(attempt, folder):
    record(folder, *({"fine": 1, "time": stamp} for stamp in (1e18, -1, 1e300, 0, 4102444800)))  # the last is in 2100
    for epoch, finished in ((-5, 0), (6, 5), (2, 5), (10.9, 10), (1e299, 10)):
        record(folder, {"epoch": epoch, "fine": 1})
        curves(attempt)
        assert (job_of(attempt).epoch, job_of(attempt).progress) == (finished, finished / 10), epoch
    assert MetricPoint.objects.count() == 10
    assert all(abs(point.at.timestamp() - time.time()) < 60 for point in MetricPoint.objects.all())


def test_output_that_is_no_text_does_not_end_the_reading(attempt, backend):
    odd = b"\xff\xfe\x00\x80 garbage \xff\n\0epoch 1\0\nepoch \xd9\xa3 loss \xd9\xa4\n"  # the last are Arabic digits
    backend.runs[attempt.run_name].output[0] = odd + b"valid acc: 25%\n" + odd
    assert [value for _step, value in curves(attempt)["validation_accuracy"]] == [0.25]


def test_a_link_a_pipe_or_a_folder_in_place_of_the_file_is_not_read(attempt, folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"secret": 42}\n')
    path = folder / "metrics.jsonl"
    for make in (lambda: path.symlink_to(secret), lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")):
        make()
        assert curves(attempt) == {}
        path.unlink()
    path.mkdir()
    assert curves(attempt) == {}


def test_a_flood_of_names_is_bounded_and_progress_is_still_read(attempt, folder):
    record(folder, {f"n{number}": 1 for number in range(300)}, {"epoch": 5, "n0": 1})
    assert len(curves(attempt)) == telemetry.MAX_CURVES
    assert job_of(attempt).epoch == 4


# --- Positions and epochs ---------------------------------------------------------------------------------------------


def positions(points):
    state, places = None, []
    for epoch, step in points:
        place, state = next_position(json.loads(json.dumps(state)), step, epoch)
        places.append(place)
    return places


POSITIONS = {
    "steps that increase are kept": ([(None, 1), (None, 2), (None, 3)], [1, 2, 3]),
    "a restarted count continues": ([(None, 0), (None, 10), (None, 20), (None, 0), (None, 10)], [0, 10, 20, 30, 40]),
    # The second epoch begins one gap (50) after the last position. Its own first step does not matter.
    "the second epoch's first report is at a later step": ([(1, 0), (1, 50), (2, 20), (2, 70)], [0, 50, 100, 150]),
    "a step that is reported again counts up": ([(None, 0), (None, 0), (None, 0)], [0, 1, 2]),
    "a step out of order is no restart": ([(None, 1), (None, 3), (None, 2), (None, 4)], [1, 3, 2, 4]),
    "steps that count over all epochs are kept": ([(1, 5), (2, 10), (3, 15)], [5, 10, 15]),
}


def test_positions_continue_where_the_step_count_restarts():
    assert {name: positions(points) for name, (points, _expected) in POSITIONS.items()} == {
        name: expected for name, (_points, expected) in POSITIONS.items()
    }


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first value waits until Hypothesis has read all modules
@given(st.integers(1, 6), st.lists(st.integers(0, 1000), min_size=2, max_size=30, unique=True).map(sorted))
def test_epochs_that_report_the_same_steps_get_distinct_increasing_positions(epochs, steps):
    for has_epochs in (True, False):
        places = positions([(epoch if has_epochs else None, step) for epoch in range(epochs) for step in steps])
        assert places == sorted(set(places))


FINISHED = [
    ([], 0), ([1], 0), ([1, 1, 2], 1), ([0], 0), ([0, 1, 9], 9), ([3], 2), ([0.5], 0), ([0.5, 1.0], 1), ([1.5], 1),
    ([2, 1], 1), ([1, 10], 9),
]  # fmt: skip
"""Epochs that were reported, and how many are finished: all before the largest. A script whose first number is 1 counts
from 1, so [1] has only begun. One that reports fractions counts from 0, so [0.5, 1.0] has finished one epoch."""


def test_an_epoch_is_finished_once_a_later_one_is_reported():
    for reports, finished in FINISHED:
        state = None
        for epoch in reports:
            state = add_epoch(state, epoch)
        assert count_finished_epochs(state) == finished, reports
