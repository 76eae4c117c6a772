"""Step and communication times of one rank, counted inside its interpreter with no change to the script.

`rank` calls `watch` for each framework module that the script imports; from then on every optimizer step and every
blocking collective adds to a few numbers in a small file that the launcher made and reads (`read`). Nothing is sent and
nothing waits, so a crash loses nothing, and the launcher can be slow. What is measured, and what is not:

    steps     `step()` of the optimizer that steps most regularly, by PyTorch's own hook for all optimizers. Horovod's
              optimizers are PyTorch's. TensorFlow's step inside a compiled graph: not available.
    time      from the end of one step to the end of the next, whatever lies between.
    communication
              PyTorch: blocking calls of `torch.distributed` and `wait()` of the others, and for DDP what its reducer
              says it waited for after backward had finished (it measures one step in twenty on CPU, one in a hundred on
              GPU; the ones between are taken to be alike). Horovod: `synchronize`. Functional collectives (tensor
              parallelism) and what NCCL does behind a call that returns at once: not available.

The one rule: whatever goes wrong here, the script goes on as if this were not there. Standard library only.
"""

from __future__ import annotations

import os
import struct
import sys
import time

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Callable, List, NamedTuple, Optional
elif __package__:
    from .plain import NamedTuple
else:  # in a rank, whose framework has imported it
    from typing import NamedTuple

SIZE = 64
_LAYOUT = struct.Struct("<8sQQdd")
_MAGIC = b"yardstep"
_NOT_KNOWN = -1.0
_COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
)
_DDP_SECONDS = 1.0
_DDP_SAMPLE_RATE = 20
_REGULAR = 3
_NEAR = 6
_LONGEST_SECONDS = 1e9


class Counts(NamedTuple):
    """What a rank has done so far: calls of `step()`, the steps that have a duration, and the sum of those, in seconds.

    `communication` is how many of these seconds it waited for others; None where nothing is known of it.
    """

    calls: int
    steps: int
    seconds: float
    communication: Optional[float]


def open_record() -> int:
    """A record in memory, for one rank: a descriptor to read here and to hand to the rank; -1 where there is none."""
    try:
        record = os.memfd_create("steps")
        os.ftruncate(record, SIZE)
    except (AttributeError, OSError):
        return -1
    return record


def read(record: int) -> Counts:
    """What is in the record; nothing where it makes no sense: the rank's code can write to it and cut it."""
    nothing = Counts(0, 0, 0.0, None)
    try:
        # Not mapped: a record that was cut would end this process.
        data = os.pread(record, _LAYOUT.size, 0)
        magic, calls, steps, seconds, communication = _LAYOUT.unpack(data)
    except (OSError, struct.error):
        return nothing
    if magic != _MAGIC or not 0.0 <= seconds < _LONGEST_SECONDS or not communication < _LONGEST_SECONDS:
        return nothing
    return Counts(calls, steps, seconds, communication if communication >= 0.0 else None)


class Recorder:
    """Counts in one process. `stepped` is called by optimizers, `timed` wraps what waits for other ranks."""

    def __init__(self, record: int, clock: Callable[[], float] = time.perf_counter) -> None:
        # Imported here for speed alone: the launcher needs of this module only what is above.
        import mmap  # noqa: PLC0415
        import threading  # noqa: PLC0415
        import weakref  # noqa: PLC0415

        self._map: Any = mmap.mmap(record, SIZE)
        self._clock = clock
        self._inside = threading.local()
        self._leader = 0
        self._others: List[int] = []
        self._calls = 0
        self._steps = 0
        self._seconds = 0.0
        self._last: Optional[float] = None
        self._communication = _NOT_KNOWN
        self._replicas: Any = weakref.WeakKeyDictionary()
        self._ask_at = 0.0
        # What is forked from here is not the rank: data loaders, for instance.
        os.register_at_fork(after_in_child=self._stop)

    def _stop(self) -> None:
        self._map = None

    def stepped(self, optimizer: Any, _arguments: Any = None, _keywords: Any = None) -> None:
        """An optimizer has made a step."""
        try:
            if not _is_nested() and self._leads(id(optimizer)):
                self._count(self._clock())
        except Exception:  # the script is not to see it, whatever it is
            return

    def _leads(self, optimizer: int) -> bool:
        """Of several optimizers only one counts: the first, unless others go on stepping without it."""
        if optimizer == self._leader:
            self._others.clear()
            return True
        self._others.append(optimizer)
        if not self._leader or self._others.count(optimizer) >= _REGULAR:
            self._leader = optimizer
            self._others.clear()
            return True
        return False

    def _count(self, now: float) -> None:
        if self._last is None:
            # What was waited for before training began (joining the group, sharing the first weights) is not of a step.
            self._communication = min(self._communication, 0.0)
        else:
            self._steps += 1
            self._seconds += now - self._last
        self._last = now
        self._calls += 1
        if self._replicas and now >= self._ask_at:
            self._ask_at = now + _DDP_SECONDS
            for replica, asked in list(self._replicas.items()):
                self._replicas[replica] = self._ask(replica, asked)
        self._write()

    def _write(self) -> None:
        if self._map is not None:
            _LAYOUT.pack_into(
                self._map, 0, _MAGIC, self._calls, self._steps, self._seconds, min(self._communication, self._seconds)
            )

    def replicated(self, replica: Any) -> None:
        """A DistributedDataParallel module was made."""
        try:
            if getattr(replica, "device_type", "") == "cpu":
                # On a GPU each measured step waits for the device.
                replica._set_ddp_runtime_logging_sample_rate(_DDP_SAMPLE_RATE)  # noqa: SLF001 - it has no other name
            self._replicas[replica] = 0
        except Exception:  # as above
            return

    def _ask(self, replica: Any, asked: int) -> int:
        """Take what DDP last measured, for all steps since the one before it; returns that step's number."""
        data = replica._get_ddp_logging_data()  # noqa: SLF001 - nor has this
        iteration = int(data.get("iteration", 0))
        if iteration > asked and "backward_comm_time" in data:
            waited = int(data["backward_comm_time"]) - int(data.get("backward_compute_comm_overlap_time", 0))
            self._waited(max(0, waited) * 1e-9 * (iteration - asked))
        return max(iteration, asked)

    def _waited(self, seconds: float) -> None:
        self._communication = max(0.0, self._communication) + seconds

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with the time spent in it counted as communication; calls inside such a call count once."""
        # Imported here for speed alone: the launcher, which reads what is counted here, has no need of it.
        import functools  # noqa: PLC0415

        inside = self._inside
        clock = self._clock

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if getattr(inside, "now", False):
                return function(*arguments, **keywords)
            inside.now = True
            begun = clock()
            try:
                return function(*arguments, **keywords)
            finally:
                inside.now = False
                self._waited(clock() - begun)

        vars(call)["trainyard"] = True  # so that no function is wrapped twice
        return call


def _is_nested() -> bool:
    """Whether the step that has just ended is part of another one's: Horovod's optimizers step by their base's step."""
    frame = sys._getframe(2)  # noqa: SLF001 - the only way to one's caller that is as quick as this
    step, above = frame.f_code, frame.f_back
    for _ in range(_NEAR):
        if above is None:
            return False
        if above.f_code is step:
            return True
        above = above.f_back
    return False


_recorder: Optional[Recorder] = None


def watch(module: Any, record: int) -> None:
    """Have this framework module's work counted in the record. Raises what a module of an unknown version makes it."""
    global _recorder  # noqa: PLW0603 - one interpreter is one rank
    if _recorder is None:
        _recorder = Recorder(record)
    _WATCHES[module.__name__](module, _recorder)


def _watch_optimizers(module: Any, recorder: Recorder) -> None:
    module.register_optimizer_step_post_hook(recorder.stepped)


def _watch_collectives(module: Any, recorder: Recorder) -> None:
    for name in _COLLECTIVES:
        _wrap(module, name, recorder)
    _wrap(module.Work, "wait", recorder)


def _watch_replicas(module: Any, recorder: Recorder) -> None:
    import functools  # noqa: PLC0415 - as in `timed`

    kind = module.DistributedDataParallel
    make = kind.__init__

    @functools.wraps(make)
    def make_and_tell(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        recorder.replicated(self)

    kind.__init__ = make_and_tell


def _watch_horovod(module: Any, recorder: Recorder) -> None:
    _wrap(module, "synchronize", recorder)


def _wrap(owner: Any, name: str, recorder: Recorder) -> None:
    """Put the timed function in place of this one, here and where it was imported to under the same name."""
    function = getattr(owner, name, None)
    if function is None or getattr(function, "trainyard", False):
        return
    timed = recorder.timed(function)
    setattr(owner, name, timed)
    family = getattr(owner, "__name__", "").partition(".")[0]
    for other, module in list(sys.modules.items()):
        if other.partition(".")[0] == family and getattr(module, "__dict__", {}).get(name) is function:
            setattr(module, name, timed)


_WATCHES = {
    "torch.optim.optimizer": _watch_optimizers,
    "torch.distributed.distributed_c10d": _watch_collectives,
    "torch.nn.parallel.distributed": _watch_replicas,
    "horovod.torch.mpi_ops": _watch_horovod,
}
