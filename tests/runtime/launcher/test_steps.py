"""Steps and communication, counted in a rank's interpreter: by hand, in a stand-in for torch, and in the real one."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runtime.launcher import rank
from runtime.launcher.steps import SIZE, Counts, Recorder, open_record, read
from runtime.specs import Framework, Outcome, Resources
from tests.runtime.images_of_ours import use_image

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

NOTHING = Counts(0, 0, 0.0, None)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Replica:
    """What DistributedDataParallel tells of itself: nanoseconds of the step that it measured last."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.rate = 0
        self.data: dict[str, Any] = {}

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.rate = rate

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self.data


@pytest.fixture
def record() -> Iterator[int]:
    descriptor = open_record()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(record: int, clock: Clock) -> Recorder:
    return Recorder(record, clock)


def test_a_step_lasts_from_the_end_of_one_to_the_end_of_the_next(record: int, recorder: Recorder, clock: Clock) -> None:
    assert read(record) == NOTHING
    recorder.stepped(self := object())
    assert read(record) == Counts(1, 0, 0.0, None)
    for _ in range(3):
        clock.now += 2.0
        recorder.stepped(self)
    assert read(record) == Counts(4, 3, 6.0, None)


def test_of_several_optimizers_one_counts(record: int, recorder: Recorder, clock: Clock) -> None:
    generator, critic = object(), object()
    for _ in range(10):
        clock.now += 1.0
        recorder.stepped(generator)
        clock.now += 1.0
        recorder.stepped(critic)
    assert read(record).steps == 9
    # The first one is not used any more: the other takes its place.
    for _ in range(10):
        clock.now += 1.0
        recorder.stepped(critic)
    assert read(record).calls == 10 + 9


def test_a_step_inside_a_step_counts_once(record: int, recorder: Recorder) -> None:
    def step(optimizer: object, inner: bool) -> None:
        if inner:
            step(optimizer, False)
        recorder.stepped(optimizer)

    optimizer = object()
    for _ in range(4):
        step(optimizer, True)
    assert read(record).calls == 4


def test_waiting_counts_from_the_first_step_on_and_once(record: int, recorder: Recorder, clock: Clock) -> None:
    def wait(seconds: float) -> str:
        clock.now += seconds
        return "done"

    collective = recorder.timed(wait)
    outer = recorder.timed(lambda: collective(1.0))
    assert collective(50.0) == "done"
    optimizer = object()
    recorder.stepped(optimizer)
    for _ in range(2):
        clock.now += 2.0
        outer()
        recorder.stepped(optimizer)
    assert read(record) == Counts(3, 2, 6.0, 2.0)
    with pytest.raises(ZeroDivisionError):
        recorder.timed(lambda: 1 / 0)()
    assert collective(1.0) == "done", "an error leaves nothing behind"


def test_what_another_thread_waits_for_does_not_hide_ones_own(record: int, recorder: Recorder, clock: Clock) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        leave.wait(20)

    recorder.stepped(optimizer := object())
    thread = threading.Thread(target=recorder.timed(hold))
    thread.start()
    assert inside.wait(20)
    recorder.timed(lambda: setattr(clock, "now", clock.now + 3.0))()
    leave.set()
    thread.join()
    recorder.stepped(optimizer)
    assert read(record).communication == 3.0


def test_ddp_says_what_it_waited_for(record: int, recorder: Recorder, clock: Clock) -> None:
    replica = Replica()
    recorder.replicated(replica)
    assert replica.rate > 0
    optimizer = object()
    for step in range(41):
        clock.now += 1.0
        if step in {10, 30}:
            waited = {"backward_comm_time": 500_000_000, "backward_compute_comm_overlap_time": 100_000_000}
            replica.data = {"iteration": step, **waited}
        recorder.stepped(optimizer)
    counted = read(record)
    assert counted.steps == 40
    assert counted.communication == pytest.approx(0.4 * 30)


def test_a_ddp_of_another_kind_is_left_alone(record: int, recorder: Recorder) -> None:
    recorder.replicated(object())
    replica = Replica()
    replica.data = {"iteration": "?"}
    recorder.replicated(replica)
    recorder.stepped(object())
    assert read(record) == NOTHING, "whatever it raises stays inside"


def test_what_is_forked_counts_nothing(record: int, recorder: Recorder) -> None:
    optimizer = object()
    recorder.stepped(optimizer)
    child = os.fork()
    if not child:
        try:
            recorder.stepped(optimizer)
            recorder.stepped(optimizer)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert read(record) == Counts(1, 0, 0.0, None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        b"x" * SIZE,
        struct.pack("<8sQQdd", b"yardstep", 1, 1, float("nan"), 0.0),
        struct.pack("<8sQQdd", b"yardstep", 1, 1, -5.0, 0.0),
        struct.pack("<8sQQdd", b"yardstep", 1, 1, 1e300, 0.0),
        struct.pack("<8sQQdd", b"yardstep", 1, 1, 1.0, float("inf")),
        struct.pack("<8sQQdd", b"yardstep", 1, 1, 1.0, float("nan")),
    ],
)
def test_a_record_that_the_code_has_spoilt_says_nothing(record: int, data: bytes) -> None:
    os.ftruncate(record, 0)
    os.pwrite(record, data, 0)
    assert read(record) == NOTHING
    assert read(-1) == NOTHING


# Inside an interpreter


FAKE_OPTIMIZER = """
hooks = []
def register_optimizer_step_post_hook(hook): hooks.append(hook)
class SGD:
    def step(self):
        for hook in hooks: hook(self, (), {})
"""


def run(tmp_path: Path, source: str, record: int) -> str:
    """A script under the wrapper, beside a stand-in for torch; what it printed."""
    package = tmp_path / "torch" / "optim"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "optimizer.py").write_text(FAKE_OPTIMIZER)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(source))
    reading, writing = os.pipe()
    command = [sys.executable, rank.__file__, f"{writing},{record}", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, pass_fds=[writing, record], check=False, timeout=60)
    os.close(writing)
    os.close(reading)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_an_import_is_enough(tmp_path: Path, record: int) -> None:
    script = """
        import sys
        import torch.optim.optimizer
        from torch.optim.optimizer import SGD
        sgd = SGD()
        for _ in range(4): sgd.step()
        print(sorted(vars(torch.optim.optimizer.__loader__)), "_trainyard_steps" in sys.modules)
    """
    assert run(tmp_path, script, record) == "['name', 'path'] True\n", "the loader is as it was"
    assert read(record).calls == 4


def test_a_script_without_a_framework_pays_nothing(tmp_path: Path, record: int) -> None:
    script = "import sys\nprint(sorted({'mmap', 'threading', '_trainyard_steps'} & set(sys.modules)))"
    assert run(tmp_path, script, record) == "[]\n"
    assert read(record) == NOTHING


@pytest.mark.parametrize("spoilt", ["raise ImportError('no')", "register_optimizer_step_post_hook = None", ""])
def test_a_framework_of_another_version_works_as_ever(tmp_path: Path, record: int, spoilt: str) -> None:
    script = f"""
        import os, sys
        folder = os.path.dirname(os.path.abspath(__file__)) + "/torch/distributed"
        os.makedirs(folder)
        open(folder + "/__init__.py", "w").close()
        open(folder + "/distributed_c10d.py", "w").write({spoilt!r})
        try:
            import torch.distributed.distributed_c10d as found
            print("imported", found.__name__)
        except ImportError as error: print("no import", error)
    """
    assert run(tmp_path, script, record) in {"no import no\n", "imported torch.distributed.distributed_c10d\n"}


def test_a_script_that_closes_everything_goes_on(tmp_path: Path, record: int) -> None:
    script = """
        import os
        from torch.optim.optimizer import SGD
        os.closerange(3, 64)
        sgd = SGD()
        for _ in range(3): sgd.step()
        print("done")
    """
    assert run(tmp_path, script, record) == "done\n"
    assert read(record).calls == 3, "what is mapped stays mapped"


# The real ones

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
    elif FRAMEWORK == "ddp": model = torch.nn.parallel.DistributedDataParallel(model)
    begun = time.monotonic()
    for step in range(200):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).sum()
        # A slow rank: the other one waits for it in every step.
        if os.environ["RANK"] == "1": time.sleep(0.02)
        loss.backward()
        if FRAMEWORK == "collective":
            for parameter in model.parameters(): dist.all_reduce(parameter.grad)
        optimizer.step()
"""


@pytest.mark.torch
@pytest.mark.parametrize("framework", ["collective", "ddp", "horovod"])
def test_a_slow_rank_and_the_time_the_others_wait_for_it_show(yard: Yard, framework: str) -> None:
    image = "horovod" if framework == "horovod" else "pytorch"
    use_image(yard, image)
    status = yard.run(
        TRAIN.replace("FRAMEWORK", repr(framework)),
        framework=Framework(image),
        workers_per_node=2,
        resources=Resources(cpus=2, memory_mib=4096),
        deadline_seconds=120,
    )
    assert status.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
    samples = [json.loads(line) for line in yard.backend.samples("job-1-1", 0, limit=1 << 20).text.splitlines()]
    compute: dict[int, float] = {}
    share: dict[int, float] = {}
    for seat in (0, 1):
        mine = [told for sample in samples for told in sample["ranks"] if told["rank"] == seat and told["steps"]]
        steps, seconds = sum(told["steps"] for told in mine), sum(told["step_seconds"] for told in mine)
        waited = sum(told["comm_seconds"] or 0.0 for told in mine)
        assert steps == 199, "every step but the first, whose beginning nobody saw"
        compute[seat], share[seat] = (seconds - waited) / steps, waited / seconds
    assert compute[1] > 1.3 * compute[0], (compute, share)
    assert share[0] > share[1], (compute, share)
    assert share[0] > 0.3, (compute, share)
