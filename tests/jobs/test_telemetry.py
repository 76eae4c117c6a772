import json
import os
import time

import pytest

from jobs import selectors, telemetry
from jobs.models import Attempt, Job, MetricPoint
from runtime.specs import Outcome
from tests.factories.jobs import Customer


@pytest.fixture
def attempt(customer):
    return customer.started()


@pytest.fixture
def folder(attempt, backend):
    return backend.run_folder(attempt.run_name) / "run"


def record(folder, *lines):
    with (folder / "metrics.jsonl").open("ab") as file:
        for line in lines:
            file.write(line if isinstance(line, bytes) else (json.dumps(line) + "\n").encode())


def curves(attempt):
    telemetry.ingest(attempt=attempt)
    return selectors.metrics(attempt.job)[0]


def job_of(attempt):
    return Job.objects.get(pk=attempt.job_id)


@pytest.mark.parametrize(
    ("line", "epoch", "step", "values"),
    [
        ("epoch 3/8 step 120 loss 0.1234 accuracy 0.9612", 3, 120, {"loss": 0.1234, "accuracy": 0.9612}),
        ("Train Epoch: 2 [640/60000 (1%)]\tLoss: 2.300", 2, None, {"loss": 2.3}),
        ("Epoch [4/10], Step [200/600], Loss: 0.4", 4, 200, {"loss": 0.4}),
        ("Epoch 5 of 10 | val_loss=1e-3", 5, None, {"validation_loss": 0.001}),
        ("valid acc: 97.5%", None, None, {"validation_accuracy": 0.975}),
        ("Test set: Average loss: 0.0512", None, None, {"average_loss": 0.0512}),
        ("Test Accuracy: 0.9123", None, None, {"test_accuracy": 0.9123}),
        ("iter 10: train_loss -1.5", None, 10, {"train_loss": -1.5}),
        ("loss .5", None, None, {"loss": 0.5}),
        ("loss: nan accuracy: inf", None, None, {}),
        ("loss: 1e999", None, None, {}),
        ("lossless compression 3", None, None, {}),
        ("", None, None, {}),
        ("epoch " + "9" * 400, None, None, {}),
        ("step " + "9" * 100 + " loss 1", None, None, {"loss": 1.0}),
    ],
)  # fmt: skip
def test_the_usual_spellings_are_read(line, epoch, step, values):
    assert telemetry.parse_line(line) == (epoch, step, values)


def test_a_line_of_spaces_takes_no_time():
    began = time.monotonic()
    for line in ("loss" + " " * 2000, "loss " * 400, "epoch" * 400, "9" * 2000, "test " * 400):
        telemetry.parse_line(line)
    assert time.monotonic() - began < 0.2


def test_lines_of_output_become_curves_and_progress(attempt, backend):
    backend.write(attempt.run_name, "epoch 1/10 loss 2.0\nepoch 2/10 loss 1.0\nnothing\nloss 0.5\n")
    assert curves(attempt) == {"loss": [[1, 2.0], [2, 1.0], [3, 0.5]]}
    job = job_of(attempt)
    assert (job.epoch, job.progress) == (2, 0.2)
    assert list(MetricPoint.objects.values_list("epoch", flat=True)) == [1.0, 2.0, 2.0]
    assert telemetry.ingest(attempt=attempt) is False


def test_a_line_counts_when_it_is_whole(attempt, backend):
    for piece in ("epoch 1 lo", "ss 2.5", "0\nloss 1"):
        backend.write(attempt.run_name, piece)
        found = curves(attempt)
    assert found == {"loss": [[1, 2.5]]}
    backend.write(attempt.run_name, ".75")
    backend.end(attempt.run_name, Outcome.COMPLETED)
    telemetry.ingest_all(attempt=attempt)
    assert curves(attempt) == {"loss": [[1, 2.5], [2, 1.75]]}


def test_a_progress_bar_is_read_at_its_returns(attempt, backend):
    backend.write(attempt.run_name, "step 1 loss 3\rstep 2 loss 2\rstep 3 loss 1\r")
    assert curves(attempt) == {"loss": [[1, 3.0], [2, 2.0], [3, 1.0]]}


def test_output_that_is_no_text_hides_no_line(attempt, backend):
    run = backend.runs[attempt.run_name]
    for number in range(5):
        run.output[0] = run.output.get(0, b"") + b"\xff\xfe\x00\x80 garbage \xff\nloss %d\n" % number
        telemetry.ingest(attempt=attempt)
    assert curves(attempt) == {"loss": [[n + 1, float(n)] for n in range(5)]}


def test_output_larger_than_a_look_is_read_to_its_end_when_the_run_ended(attempt, backend, monkeypatch):
    monkeypatch.setattr(telemetry, "MOST_BYTES", 1000)
    backend.write(attempt.run_name, "".join(f"step {n} loss {n}\n" for n in range(1, 501)))
    backend.end(attempt.run_name, Outcome.COMPLETED)
    telemetry.ingest_all(attempt=attempt)
    assert MetricPoint.objects.count() == 500


def test_the_metrics_file_is_read_from_where_the_last_look_ended(attempt, folder):
    record(folder, {"epoch": 1, "step": 10, "loss": 0.5, "time": 1700000000}, {"loss": 0.25})
    assert curves(attempt) == {"loss": [[2, 0.25], [10, 0.5]]}
    record(folder, b'{"loss": 0.1')
    assert len(curves(attempt)["loss"]) == 2
    record(folder, b', "step": 11}\n')
    assert curves(attempt)["loss"][-1] == [11, 0.1]
    assert MetricPoint.objects.get(step=10).at.timestamp() == 1700000000
    assert job_of(attempt).epoch == 1


def test_a_name_in_the_file_is_not_read_from_output_too(attempt, backend, folder):
    record(folder, {"step": 5, "loss": 0.5})
    backend.write(attempt.run_name, "step 5 loss 9 accuracy 0.5\n")
    assert curves(attempt) == {"loss": [[5, 0.5]], "accuracy": [[5, 0.5]]}


HOSTILE = [
    b"not json\n", b"[1, 2]\n", b'"text"\n', b"null\n", b"{\n", b'{"loss": NaN}\n', b'{"loss": Infinity}\n',
    b'{"loss": 1e999}\n', b'{"loss": true}\n', b'{"loss": "1"}\n', b'{"loss": {"a": 1}}\n', b'{"": 1}\n',
    b'{"a\\u0000b": 1}\n', b'{"\\ud800": 1}\n', b'{"<script>": 1}\n', b'{"loss": 1, "step": 1e299}\n',
    b"\xff\xfe\n", b'{"a": ' + b"[" * 100_000 + b"\n", b'{"loss": ' + b"9" * 5000 + b"}\n", b"\x00" * 1000 + b"\n",
    b'{"x' + b"y" * 200 + b'": 1}\n', b'{"' + b"n" * 100 + b'\\n": 1}\n', b'{"loss": 1, "step": -9007199254740993}\n',
]  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: repr(line[:24]))
def test_a_line_that_is_no_record_is_passed_over(attempt, folder, line):
    record(folder, line, {"step": 7, "fine": 1})
    assert curves(attempt) == {"fine": [[7, 1.0]]}


@pytest.mark.parametrize("epoch", [1e299, -5, 99, 10.9])
def test_an_epoch_out_of_range_is_bounded(attempt, folder, epoch):
    record(folder, {"epoch": epoch, "fine": 1})
    assert curves(attempt)["fine"]
    assert 0 <= job_of(attempt).progress <= 1
    assert job_of(attempt).epoch in {0, 10}


@pytest.mark.parametrize("stamp", [1e18, -1, 1e300, 0, 4102444800])
def test_a_time_that_cannot_be_is_now(attempt, folder, stamp):
    record(folder, {"fine": 1, "time": stamp})
    curves(attempt)
    assert abs(MetricPoint.objects.get().at.timestamp() - time.time()) < 60


@pytest.mark.parametrize(
    "line",
    ["epoch " + "9" * 400, "epoch 99999999999999999999 loss 1", "step " + "9" * 30 + " loss 1", "loss " + "9" * 500,
     "epoch 1e5 loss 1e-400", "\0epoch 1\0", "epoch \u0663 loss \u0664"],
    ids=lambda line: repr(line[:24]),
)  # fmt: skip
def test_no_line_of_output_breaks_the_reading(attempt, backend, line):
    backend.write(attempt.run_name, f"{line}\nstep 3 accuracy 0.5\n{line}")
    assert curves(attempt)["accuracy"] == [[3, 0.5]]


def test_a_link_a_pipe_or_a_folder_in_place_of_the_file_is_not_read(attempt, folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"secret": 42}\n')
    path = folder / "metrics.jsonl"
    for make in (
        lambda: path.symlink_to(secret),
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: path.symlink_to("/dev/zero"),
    ):
        make()
        assert curves(attempt) == {}
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_huge_line_is_read_past_in_pieces(attempt, folder, monkeypatch):
    monkeypatch.setattr(telemetry, "MOST_BYTES", 1000)
    record(folder, b"x" * 5000 + b"\n", {"fine": 1, "step": 1})
    for _ in range(8):
        found = curves(attempt)
    assert found == {"fine": [[1, 1.0]]}


def test_a_flood_of_names_and_points_is_bounded(attempt, folder, monkeypatch):
    monkeypatch.setattr(telemetry, "MOST_POINTS", 200)
    record(folder, {f"n{number}": 1 for number in range(300)})
    assert len(curves(attempt)) == telemetry.MOST_NAMES
    for step in range(300):
        record(folder, {"n0": 1, "step": step + 10})
    curves(attempt)
    assert MetricPoint.objects.count() <= 200
    record(folder, {"epoch": 4, "n0": 1})
    curves(attempt)
    assert job_of(attempt).epoch == 4


def test_an_endless_line_of_output_is_not_remembered_whole(attempt, backend):
    backend.write(attempt.run_name, "x" * 300_000)
    curves(attempt)
    attempt.refresh_from_db()
    assert len(json.dumps(attempt.cursor)) < 2 * telemetry.LONGEST_LINE
    backend.write(attempt.run_name, "\nstep 1 loss 2\n")
    assert curves(attempt) == {"loss": [[1, 2.0]]}


def test_progress_never_goes_back(attempt, folder):
    record(folder, {"epoch": 5, "a": 1})
    curves(attempt)
    record(folder, {"epoch": 2, "a": 1})
    curves(attempt)
    assert (job_of(attempt).epoch, job_of(attempt).progress) == (5, 0.5)


def test_who_read_less_does_not_move_the_reading_back(attempt, backend, monkeypatch):
    read_log, looks = telemetry._read_log, []

    def overtaken(*arguments):
        read_log(*arguments)
        if not looks:
            looks.append(1)
            backend.write(attempt.run_name, "epoch 2 loss 2\n")
            assert telemetry.ingest(attempt=attempt)

    monkeypatch.setattr(telemetry, "_read_log", overtaken)
    backend.write(attempt.run_name, "epoch 1 loss 1\n")
    assert telemetry.ingest(attempt=attempt)
    attempt.refresh_from_db()
    assert attempt.cursor["log"] == 30
    assert selectors.metrics(attempt.job)[0] == {"loss": [[1, 1.0], [2, 2.0]]}


def test_a_run_that_is_not_there_is_nothing_new(customer, backend):
    job = customer.job()
    attempt = Attempt.objects.create(job=job, number=1, backend="local", granted_nodes=2, claimed_at=job.queued_at)
    assert telemetry.ingest(attempt=attempt) is False


class TestAtOnce:
    pytestmark = pytest.mark.django_db(transaction=True)

    def test_what_many_read_at_once_counts_once(self, transactional_db, backend, hints, together):
        attempt = Customer(backend).started()
        for number in range(1, 11):
            backend.write(attempt.run_name, f"loss {number}\n")
            results = together(*[lambda: telemetry.ingest(attempt=attempt)] * 3)
            assert not [result for result in results if isinstance(result, Exception)], results
        assert list(MetricPoint.objects.order_by("step").values_list("step", "value")) == [
            (number, float(number)) for number in range(1, 11)
        ]
