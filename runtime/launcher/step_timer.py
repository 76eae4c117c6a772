"""Count one rank's steps and communication time inside its interpreter, without changes to the script.

`rank.py` calls `watch` for each framework module that the script imports. From then on every optimizer step and every
blocking collective adds to a few numbers in a small file in memory. The launcher created the file and reads it. Nothing
is sent and nothing waits, so a crash loses nothing and a slow launcher delays nothing. The file counts:

    steps     Calls of `step()` of one optimizer, which `Recorder` chooses. PyTorch's hook for all optimizers reports
              them, also for Horovod's optimizers. Not available for TensorFlow, which steps inside a compiled graph.
    time      From the end of one step to the end of the next, including everything in between.
    communication
              PyTorch: blocking calls of `torch.distributed`, and `wait()` after its asynchronous calls; with DDP, the
              time that its reducer waited after the backward pass. DDP measures one step in twenty on CPU and one in a
              hundred on GPU; the steps in between are assumed to take the same time. Horovod: `synchronize`. Not
              available for functional collectives (tensor parallelism) and for what NCCL does after a call has
              returned.

If anything fails here, the script goes on without measurements. Standard library only.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from typing import Any, Callable, List, NamedTuple, Optional

FILE_BYTES = 64
"""The size of the file. It is larger than `_LAYOUT`, so that a later version can add fields."""
_LAYOUT = struct.Struct("<8sQQdd")  # `_MAGIC`, then the fields of `Counts`
_MAGIC = b"yardstep"
"""The first bytes of a valid file, which the rank writes with its first counts."""
_UNKNOWN = -1.0  # `communication`, until something was measured
# Blocking functions of `torch.distributed`.
_COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "recv", "recv_object_list", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
)  # fmt: skip
_DDP_INTERVAL_SECONDS = 1.0
"""Minimum interval between two readings of DDP's measurements. A reading takes 0.1 ms."""
_DDP_SAMPLE_RATE = 20
"""On CPU, DDP measures one step in this many, instead of one in a hundred. On a CPU, steps are long and measuring is
cheap."""
_STEPS_TO_REPLACE = 3
"""If another optimizer steps this often while the counted one does not, the other is counted from then on. A smaller
number would switch between optimizers that alternate, as in a GAN."""
_MAX_CALLER_DEPTH = 6
"""How many callers of a `step()` are searched for another `step()`: wrappers such as Horovod's and a scheduler's lie in
between."""
_MAX_VALID_SECONDS = 1e9
"""Larger sums of seconds are invalid: they exceed 30 years."""


class Counts(NamedTuple):
    """A rank's counts: `calls` of `step()`, `steps` (all calls but the first, which has no duration), their `seconds`.

    `communication` is the part of `seconds` in which the rank waited for other ranks; None if it is not known.
    """

    calls: int
    steps: int
    seconds: float
    communication: Optional[float]


def open_counts() -> int:
    """Create the file of a rank's counts in memory; return its descriptor, which the rank inherits.

    -1 if this system has no such files.
    """
    try:
        counts_fd = os.memfd_create("steps")
        os.ftruncate(counts_fd, FILE_BYTES)
    except (AttributeError, OSError):
        return -1
    return counts_fd


def read_counts(counts_fd: int) -> Counts:
    """Return a rank's counts; zeros if the file is invalid, since the rank's code can write to it and truncate it."""
    invalid = Counts(0, 0, 0.0, None)
    try:
        # The file is read and not mapped, since access to a truncated mapping would kill this process.
        data = os.pread(counts_fd, _LAYOUT.size, 0)
        magic, calls, steps, seconds, communication = _LAYOUT.unpack(data)
    except (OSError, struct.error):
        return invalid
    # The comparisons are false for NaN, so NaN is invalid too. A negative `communication` stands for "not known".
    if magic != _MAGIC or not 0.0 <= seconds < _MAX_VALID_SECONDS or not communication < _MAX_VALID_SECONDS:
        return invalid
    return Counts(calls, steps, seconds, communication if communication >= 0.0 else None)


class Recorder:
    """Counts in one process. Optimizers call `note_step`; `with_timing` wraps functions that wait for other ranks."""

    def __init__(self, counts_fd: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._map: Any = mmap.mmap(counts_fd, FILE_BYTES)
        self._clock = clock
        self._thread_state = threading.local()  # `is_timing`: this thread is inside a timed function
        self._counted_optimizer = 0  # its id()
        self._other_optimizers: List[int] = []  # ids of the others that have stepped since the counted one did
        self._calls = 0
        self._steps = 0
        self._seconds = 0.0
        self._last_step_at: Optional[float] = None  # the end of the last step
        self._communication = _UNKNOWN
        self._ddp_modules: Any = weakref.WeakKeyDictionary()  # the last measured step of each, by the DDP module
        self._next_ddp_reading_at = 0.0
        # Processes forked from the rank, such as data loaders, do not count.
        os.register_at_fork(after_in_child=self._stop)

    def _stop(self) -> None:
        self._map = None

    def note_step(self, optimizer: Any, _arguments: Any = None, _keywords: Any = None) -> None:
        """Count a step of an optimizer. The other parameters are those of PyTorch's hook."""
        try:
            if not _is_nested() and self._note_optimizer(id(optimizer)):
                self._count(self._clock())
        except Exception:  # an error here must not reach the script
            return

    def _note_optimizer(self, optimizer_id: int) -> bool:
        """Note which optimizer has stepped; return whether its step counts.

        Only the steps of one optimizer count: the first, until another replaces it (`_STEPS_TO_REPLACE`).
        """
        if optimizer_id == self._counted_optimizer:
            self._other_optimizers.clear()
            return True
        self._other_optimizers.append(optimizer_id)
        if not self._counted_optimizer or self._other_optimizers.count(optimizer_id) >= _STEPS_TO_REPLACE:
            self._counted_optimizer = optimizer_id
            self._other_optimizers.clear()
            return True
        return False

    def _count(self, now: float) -> None:
        """Add a step that ended at `now`, and write the sums to the file."""
        is_first = self._last_step_at is None
        if self._last_step_at is None:
            # Time spent waiting before training (joining the group, sharing the first weights) is not part of a step.
            # So a measured time becomes 0, while the negative `_UNKNOWN` stays.
            self._communication = min(self._communication, 0.0)
        else:
            self._steps += 1
            self._seconds += now - self._last_step_at
        self._last_step_at = now
        self._calls += 1
        if is_first:
            # The first step's communication does not count, like its time. DDP reports an iteration only when the next
            # begins, so this step's own iteration is the one after the latest that DDP has reported.
            for module in list(self._ddp_modules):
                data = module._get_ddp_logging_data()  # noqa: SLF001 - torch has no public name for it
                self._ddp_modules[module] = int(data.get("iteration", 0)) + 1
        elif self._ddp_modules and now >= self._next_ddp_reading_at:
            self._next_ddp_reading_at = now + _DDP_INTERVAL_SECONDS
            for module, iteration in list(self._ddp_modules.items()):
                self._ddp_modules[module] = self._read_ddp_time(module, iteration)
        self._write()

    def _write(self) -> None:
        if self._map is not None:
            # Steps that DDP did not measure are estimates, so their sum could exceed the time of all steps.
            _LAYOUT.pack_into(
                self._map, 0, _MAGIC, self._calls, self._steps, self._seconds, min(self._communication, self._seconds)
            )

    def add_ddp_module(self, module: Any) -> None:
        """Note a new DistributedDataParallel module."""
        try:
            if getattr(module, "device_type", "") == "cpu":
                # On a GPU, measuring a step waits for the device, so DDP's own rate stays.
                module._set_ddp_runtime_logging_sample_rate(_DDP_SAMPLE_RATE)  # noqa: SLF001 - torch has no public name for it
            self._ddp_modules[module] = 0
        except Exception:  # an error here must not reach the script
            return

    def _read_ddp_time(self, module: Any, last_iteration: int) -> int:
        """Count DDP's latest measurement for every step since the previous measurement.

        Returns the number of the step that was measured last.
        """
        data = module._get_ddp_logging_data()  # noqa: SLF001 - torch has no public name for it
        iteration = int(data.get("iteration", 0))
        if iteration > last_iteration and "backward_comm_time" in data:
            # DDP measures nanoseconds of one step.
            waited_ns = int(data["backward_comm_time"]) - int(data.get("backward_compute_comm_overlap_time", 0))
            self._add_communication(max(0, waited_ns) * 1e-9 * (iteration - last_iteration))
        return max(iteration, last_iteration)

    def _add_communication(self, seconds: float) -> None:
        self._communication = max(0.0, self._communication) + seconds

    def with_timing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed as communication; nested calls count once."""
        state = self._thread_state
        clock = self._clock

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if getattr(state, "is_timing", False):
                return function(*arguments, **keywords)
            state.is_timing = True
            started_at = clock()
            try:
                return function(*arguments, **keywords)
            finally:
                state.is_timing = False
                self._add_communication(clock() - started_at)

        vars(call)["trainyard"] = True  # so that no function is wrapped twice
        return call


def _is_nested() -> bool:
    """Whether this step is part of another one: the `step` of Horovod's optimizers calls that of their base class."""
    # 0 is this function, 1 `note_step`, 2 torch's wrapper. All `step()`s share the wrapper's code, so this step is
    # nested if a caller has the same code.
    frame = sys._getframe(2)  # noqa: SLF001 - the public `inspect` is far slower, and this runs at every step
    step_code, caller = frame.f_code, frame.f_back
    for _depth in range(_MAX_CALLER_DEPTH):
        if caller is None:
            return False
        if caller.f_code is step_code:
            return True
        caller = caller.f_back
    return False


_recorder: Optional[Recorder] = None


def watch(module: Any, counts_fd: int) -> None:
    """Count the steps and collectives of a framework's module. An unknown version may raise any exception."""
    global _recorder  # noqa: PLW0603 - one interpreter is one rank
    if _recorder is None:
        _recorder = Recorder(counts_fd)
    _WATCH_FUNCTIONS[module.__name__](module, _recorder)


def _watch_optimizers(module: Any, recorder: Recorder) -> None:
    module.register_optimizer_step_post_hook(recorder.note_step)


def _watch_collectives(module: Any, recorder: Recorder) -> None:
    for name in _COLLECTIVES:
        _wrap(module, name, recorder)
    _wrap(module.Work, "wait", recorder)


def _watch_ddp(module: Any, recorder: Recorder) -> None:
    ddp_class = module.DistributedDataParallel
    original_init = ddp_class.__init__

    @functools.wraps(original_init)
    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        original_init(self, *arguments, **keywords)
        recorder.add_ddp_module(self)

    ddp_class.__init__ = init


def _watch_horovod(module: Any, recorder: Recorder) -> None:
    _wrap(module, "synchronize", recorder)


def _wrap(owner: Any, name: str, recorder: Recorder) -> None:
    """Replace a function by its timed version, in `owner` and in modules of the same package that imported it."""
    function = getattr(owner, name, None)
    if function is None or getattr(function, "trainyard", False):
        return
    timed_function = recorder.with_timing(function)
    setattr(owner, name, timed_function)
    package = getattr(owner, "__name__", "").partition(".")[0]
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == package and getattr(module, "__dict__", {}).get(name) is function:
            setattr(module, name, timed_function)


_WATCH_FUNCTIONS = {
    "torch.optim.optimizer": _watch_optimizers,
    "torch.distributed.distributed_c10d": _watch_collectives,
    "torch.nn.parallel.distributed": _watch_ddp,
    "horovod.torch.mpi_ops": _watch_horovod,
}
