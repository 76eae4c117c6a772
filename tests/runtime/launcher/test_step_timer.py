"""Steps and communication of a rank: the recorder, with a fake torch, and in real training."""

import json
import os
import struct
import subprocess
import sys
import textwrap

import pytest

from runtime.launcher import rank
from runtime.launcher.step_timer import FILE_BYTES, Counts, Recorder, open_counts, read_counts
from runtime.specs import Framework, Resources
from tests.runtime.images_of_ours import use_image

pytestmark = pytest.mark.rerun_if_late("it talks to real processes, with time limits of seconds")

NOTHING = Counts(0, 0, 0.0, None)
"""No calls of `step()`, no steps with a duration, their seconds, and no known part of these for communication."""


@pytest.fixture
def counts_fd():
    descriptor = open_counts()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def recorder(counts_fd, clock):
    return Recorder(counts_fd, clock)


def test_a_step_lasts_from_the_end_of_one_to_the_end_of_the_next(counts_fd, recorder, clock):
    assert read_counts(counts_fd) == NOTHING
    optimizer = object()
    recorder.note_step(optimizer)
    assert read_counts(counts_fd) == Counts(1, 0, 0.0, None)
    for _ in range(3):
        clock.now += 2.0
        recorder.note_step(optimizer)
    assert read_counts(counts_fd) == Counts(4, 3, 6.0, None)


def test_of_several_optimizers_one_counts(counts_fd, recorder, clock):
    generator, critic = object(), object()
    for _ in range(10):
        clock.now += 1.0
        recorder.note_step(generator)
        clock.now += 1.0
        recorder.note_step(critic)
    assert read_counts(counts_fd).steps == 9, "the first step has no known beginning"
    # The first optimizer is no longer used, so the other one counts, from its third step in a row on. The first of the
    # three was the last step above, so 9 of these 10 count.
    for _ in range(10):
        clock.now += 1.0
        recorder.note_step(critic)
    assert read_counts(counts_fd).calls == 10 + 9


def test_waiting_counts_from_the_first_step_on_and_once_if_calls_are_nested(counts_fd, recorder, clock):
    def wait(seconds):
        clock.now += seconds
        return "done"

    collective = recorder.with_timing(wait)
    outer = recorder.with_timing(lambda: collective(1.0))
    assert collective(50.0) == "done"  # before the first step, so it does not count
    optimizer = object()
    recorder.note_step(optimizer)
    for _ in range(2):
        clock.now += 2.0
        outer()
        recorder.note_step(optimizer)
    assert read_counts(counts_fd) == Counts(3, 2, 6.0, 2.0)
    with pytest.raises(ZeroDivisionError):
        recorder.with_timing(lambda: 1 / 0)()
    assert collective(1.0) == "done"
    recorder.note_step(optimizer)
    assert read_counts(counts_fd).communication == 3.0, "after an error, waiting is counted as before"


def test_the_first_steps_wait_does_not_count_though_ddp_reports_it_at_the_second(counts_fd, recorder, clock):
    module, optimizer = SimpleModule(), object()
    recorder.add_ddp_module(module)
    for iteration, waited_seconds in enumerate((0, 30, 0.5, 0.5)):  # of the previous iteration, as DDP reports them
        clock.now += 2.0
        module.data = {"iteration": iteration, "backward_comm_time": int(waited_seconds * 1e9)}
        recorder.note_step(optimizer)
    assert read_counts(counts_fd) == Counts(4, 3, 6.0, 1.0)


class SimpleModule:
    """Stands in for a DistributedDataParallel module."""

    def _get_ddp_logging_data(self):
        return self.data


def test_forked_processes_count_nothing(counts_fd, recorder):
    optimizer = object()
    recorder.note_step(optimizer)
    child = os.fork()
    if not child:
        try:
            recorder.note_step(optimizer)
            recorder.note_step(optimizer)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert read_counts(counts_fd) == Counts(1, 0, 0.0, None)


@pytest.mark.parametrize(
    "data",
    [
        b"short",
        b"x" * FILE_BYTES,
        *(
            struct.pack("<8sQQdd", b"yardstep", 1, 1, seconds, waited)  # a valid header
            for seconds, waited in ((float("nan"), 0.0), (-5.0, 0.0), (1e300, 0.0), (1.0, float("nan")))
        ),
    ],
)
def test_counts_that_the_code_has_overwritten_are_ignored(counts_fd, data):
    os.ftruncate(counts_fd, 0)
    os.pwrite(counts_fd, data, 0)
    assert read_counts(counts_fd) == read_counts(-1) == NOTHING  # -1: the rank has no such file


# Inside an interpreter


FAKE_OPTIMIZER = """
hooks = []
def register_optimizer_step_post_hook(hook): hooks.append(hook)
class SGD:
    def step(self):
        for hook in hooks: hook(self, (), {})
"""


def run(tmp_path, source, counts_fd):
    """Run a script in the wrapper with a fake torch; return its output."""
    package = tmp_path / "torch" / "optim"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "optimizer.py").write_text(FAKE_OPTIMIZER)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(source))
    reading, writing = os.pipe()
    # The wrapper gets the pipe of its reports, the file of the counts, and the script.
    command = [sys.executable, rank.__file__, f"{writing},{counts_fd}", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, pass_fds=[writing, counts_fd], check=False, timeout=60
    )
    os.close(writing)
    os.close(reading)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_importing_the_framework_starts_the_step_timer(tmp_path, counts_fd):
    script = """
        import sys
        import torch.optim.optimizer
        from torch.optim.optimizer import SGD
        sgd = SGD()
        for _ in range(4): sgd.step()
        print(sorted(vars(torch.optim.optimizer.__loader__)), "_trainyard_steps" in sys.modules)
    """
    assert run(tmp_path, script, counts_fd) == "['name', 'path'] True\n", "the module has its usual loader again"
    assert read_counts(counts_fd).calls == 4


def test_a_script_without_a_framework_imports_no_timer(tmp_path, counts_fd):
    script = "import sys\nprint(sorted({'mmap', 'threading', '_trainyard_steps'} & set(sys.modules)))"
    assert run(tmp_path, script, counts_fd) == "[]\n"
    assert read_counts(counts_fd) == NOTHING


@pytest.mark.parametrize(
    ("module", "printed"),
    [("raise ImportError('no')", "no import no\n"), ("", "imported torch.distributed.distributed_c10d\n")],
    ids=["fails at its import", "lacks the functions that are timed"],
)
def test_an_unknown_framework_version_is_not_disturbed(tmp_path, counts_fd, module, printed):
    script = f"""
        import os, sys
        folder = os.path.dirname(os.path.abspath(__file__)) + "/torch/distributed"
        os.makedirs(folder)
        open(folder + "/__init__.py", "w").close()
        open(folder + "/distributed_c10d.py", "w").write({module!r})
        try:
            import torch.distributed.distributed_c10d as found
            print("imported", found.__name__)
        except ImportError as error: print("no import", error)
    """
    assert run(tmp_path, script, counts_fd) == printed


# In real training

TRAIN = """
    import os, time, torch
    if FRAMEWORK == "horovod":
        import horovod.torch as hvd
        hvd.init()
    else:
        import torch.distributed as dist
        dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if FRAMEWORK == "horovod": optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else: model = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).sum()
        # A slow rank: the other one waits for it in every step.
        if os.environ["RANK"] == "1": time.sleep(0.03)
        loss.backward()
        if FRAMEWORK == "pytorch":
            if os.environ["RANK"] == "1": time.sleep(0.03)
            dist.all_reduce(loss.detach())
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.cores(2)
@pytest.mark.torch
@pytest.mark.parametrize(("framework", "least_share"), [("pytorch", 0.55), ("horovod", 0.3)])
def test_a_slow_rank_shows_in_the_other_ranks_waiting_time(harness, framework, least_share):
    """With PyTorch, rank 1 is late for DDP's own reduction and for a collective: the waits for both must be seen.
    The two waits are equally long, so seeing only one would give a share below 0.55.

    With Horovod, rank 1 is late once in a step, so the other rank waits for a smaller share of the time.
    """
    use_image(harness, framework)
    harness.complete(
        TRAIN.replace("FRAMEWORK", repr(framework)),
        framework=Framework(framework),
        workers_per_node=2,
        resources=Resources(cpus=2, memory_mib=4096),
        deadline_seconds=120,
    )
    samples = [json.loads(line) for line in harness.backend.samples("job-1-1", 0, limit=1 << 20).text.splitlines()]
    compute, share = {}, {}
    for rank_id in (0, 1):
        usages = [usage for sample in samples for usage in sample["ranks"] if usage["rank"] == rank_id]
        steps, seconds = sum(usage["steps"] for usage in usages), sum(usage["step_seconds"] for usage in usages)
        waited = sum(usage["comm_seconds"] or 0.0 for usage in usages)
        assert steps == 99, "the first step has no known beginning"
        compute[rank_id], share[rank_id] = (seconds - waited) / steps, waited / seconds
    assert compute[1] > 1.3 * compute[0], (compute, share)  # so the console calls rank 1 slow
    assert share[0] > share[1], (compute, share)
    assert share[0] > least_share, (compute, share)
