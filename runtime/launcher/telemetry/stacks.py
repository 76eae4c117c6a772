"""Capture what ranks are doing: the stacks of all threads, and the kernel's state of their processes.

On STACK_SIGNAL, a rank's interpreter writes its stacks to the pipe that it shares with the launcher (`rank`). The
signal kills a process that does not handle it. The launcher therefore sends it only to a process that handles the
signal and has that pipe open. The customer's code could write false stacks, so they are shown, limited in size,
and never trusted.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..processes import send_signal
from ..rank import PLATFORM_FILE_NAME, STACK_SIGNAL, find_displayed_paths, replace_paths
from .hang_detector import NOT_WAITING, WAITING, WAITING_IF_IDLE, RankState
from .sampling import PROC, Process, read_file

MAX_TEXT_LENGTH = 128 << 10
"""Maximum characters of a rank's stacks. The message must fit into one line of `protocol` (1 MiB), and a character may
take six bytes of JSON. A longer line would end the connection, and the node would count as lost."""
ANSWER_SECONDS = 2.0
"""How long a rank may take to write its stacks. An interpreter does so within milliseconds, unless its process cannot
run."""
_QUIET_SECONDS = 0.15
"""Stacks have no end mark, so they count as complete once a rank has written nothing for so long."""
_MAX_CHILDREN = 32
"""Maximum number of a rank's other processes that are shown. Most scripts have fewer data loaders."""
_MAX_THREADS = 512
"""Maximum number of threads of a process that are read, since code can start any number."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')  # as faulthandler writes it
_INNERMOST_FRAMES = 4
"""How many innermost frames of a stack are compared with the functions that wait, since such a function may itself call
a few helpers."""
_MAX_PLACE_LENGTH = 200
"""Maximum characters of a rank's place: file name, line and function. A message quotes it; most are far shorter."""
_DIGEST_LENGTH = 16
"""Hexadecimal digits of a digest of stacks: 64 bits, so two different stacks never have the same one by chance."""
# How the file names of the platform's own frames end. PLATFORM_FILE_NAME is the name of modules that are compiled from
# their source, not from a file.
_PLATFORM_FILES = ("/launcher/rank.py", "/launcher/step_timer.py", "/launcher/warm/forkserver.py", PLATFORM_FILE_NAME)
# Functions that only wait: for other ranks, or for a device that may wait for them. Each is (end of the file's name,
# function). A name that ends with "/" stands for all files below that folder, and "" for all functions.
_WAITS = (
    ("torch/distributed/distributed_c10d.py", ""),
    ("torch/distributed/_functional_collectives.py", ""),
    ("torch/distributed/utils.py", ""),
    ("torch/distributed/tensor/", ""),
    ("torch/cuda/__init__.py", "synchronize"),
    ("torch/cuda/streams.py", "synchronize"),
    ("horovod/torch/mpi_ops.py", "synchronize"),
    ("horovod/torch/mpi_ops.py", "barrier"),
    ("horovod/torch/mpi_ops.py", "join"),
    ("horovod/tensorflow/mpi_ops.py", ""),
)
# Functions that wait for other ranks, but also compute; in the form of `_WAITS`.
_WAITS_IF_IDLE = (
    ("torch/autograd/graph.py", "_engine_run_backward"),
    ("torch/nn/parallel/distributed.py", ""),
    ("tensorflow/python/eager/execute.py", "quick_execute"),
)
# The letters of a process's state in /proc/<pid>/stat.
_STATE_NAMES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk",
    "T": "stopped by a signal",
    "t": "stopped by a tracer",
    "Z": "ended, not yet reaped",
    "X": "dead",
    "I": "idle",
}


class Frame(NamedTuple):
    """One frame of a Python stack."""

    file: str
    line: int
    function: str


class CaptureTarget(NamedTuple):
    """A rank to capture: its process, and the launcher's descriptor of the pipe that it reports through."""

    pid: int
    report_fd: int


class StackCapture:
    """One capture of some ranks of this node. All dicts are by `worker_group.Rank.rank_id`: the rank at submission.

    Call `start` to signal them, then `add_data` with everything that they write, until `is_over`.
    """

    def __init__(self, ranks: Mapping[int, CaptureTarget], proc: str = PROC) -> None:
        self._ranks = dict(ranks)
        self._proc = proc
        self._output: Dict[int, bytes] = {}  # of the ranks that were sent the signal
        self._unavailable: Dict[int, str] = {}  # for each other rank, why it was not
        self._started_at = 0.0
        self._last_data_at: Dict[int, float] = {}

    def start(self, now: float) -> None:
        """Send the signal to every rank that can answer."""
        self._started_at = now
        for rank_id, rank in self._ranks.items():
            reason = unavailable_reason(rank, self._proc)
            if reason:
                self._unavailable[rank_id] = reason
            else:
                self._output[rank_id] = b""
                send_signal(rank.pid, STACK_SIGNAL)

    def add_data(self, rank_id: int, data: bytes, now: float) -> None:
        """Add data that a rank has written. Lines that are not part of a stack are left out later."""
        if rank_id in self._output:
            self._output[rank_id] = (self._output[rank_id] + data)[:MAX_TEXT_LENGTH]
            self._last_data_at[rank_id] = now

    def ends_at(self) -> float:
        """Return when the capture ends unless ranks write more (monotonic)."""
        give_up_at = self._started_at + ANSWER_SECONDS
        if len(self._last_data_at) < len(self._output):
            return give_up_at  # a rank has not written anything yet
        if not self._output:
            return self._started_at  # no rank can answer
        return min(give_up_at, max(self._last_data_at.values()) + _QUIET_SECONDS)

    def is_over(self, now: float) -> bool:
        """Whether all ranks have answered, or have taken too long."""
        return now >= self.ends_at()

    def rank_states(self) -> Dict[int, RankState]:
        """Return what each rank was doing. A rank without an answer has no place, and counts as not waiting."""
        return {
            rank_id: rank_state(self._output.get(rank_id, b"").decode("utf-8", "replace")) for rank_id in self._ranks
        }

    def describe_ranks(
        self, processes: Mapping[int, Process], pids_by_rank: Mapping[int, Sequence[int]]
    ) -> Dict[int, str]:
        """Return the text to show for each rank. `pids_by_rank`: each rank's pids, its own included."""
        return {
            rank_id: self._describe_rank(rank_id, processes, pids_by_rank.get(rank_id, ())) for rank_id in self._ranks
        }

    def _describe_rank(self, rank_id: int, processes: Mapping[int, Process], pids: Sequence[int]) -> str:
        pid = self._ranks[rank_id].pid
        lines = ["Rank {}: {}".format(rank_id, self._describe_process(processes.get(pid), pid)), ""]
        stacks = stack_lines(self._output.get(rank_id, b"").decode("utf-8", "replace"))
        if stacks:
            lines += stacks
        else:
            reason = self._unavailable.get(rank_id) or "it did not answer within {:g} seconds".format(ANSWER_SECONDS)
            lines.append("No stack could be taken: {}.".format(reason))
        lines += ["", "Threads, as the kernel sees them:", *self._describe_threads(pid)]
        children = [child for child in pids if child != pid]
        if children:
            lines += ["", "Other processes of this rank:"]
            lines += ["  " + self._describe_process(processes.get(child), child) for child in children[:_MAX_CHILDREN]]
            if len(children) > _MAX_CHILDREN:
                lines.append("  ... and {} more".format(len(children) - _MAX_CHILDREN))
        # Stacks name the image's files by paths of the host; customers see the run's own paths of the same files.
        return replace_paths("\n".join(lines), find_displayed_paths())[:MAX_TEXT_LENGTH] + "\n"

    def _describe_process(self, process: Optional[Process], pid: int) -> str:
        if process is None:
            return "process {} has ended".format(pid)
        name = _read_text("{}/{}/comm".format(self._proc, pid))
        state = _STATE_NAMES.get(process.state, process.state)
        place = _kernel_place("{}/{}".format(self._proc, pid))
        return "process {} ({}), {}{}, {:.2f} s of CPU".format(pid, name, state, place, process.cpu_seconds)

    def _describe_threads(self, pid: int) -> List[str]:
        """Return a line for each kind of thread of a process: its name, where it waits, and how many there are."""
        folder = "{}/{}/task".format(self._proc, pid)
        try:
            threads = sorted(map(int, os.listdir(folder)))
        except OSError:
            return ["  none can be seen"]
        # A framework has many threads of one name that all wait in the same place.
        counts: Dict[str, int] = {}
        for thread in threads[:_MAX_THREADS]:
            description = _read_text("{}/{}/comm".format(folder, thread))
            description += _kernel_place("{}/{}".format(folder, thread))
            counts[description] = counts.get(description, 0) + 1
        lines = [
            "  " + description + ("" if count == 1 else ", {} of them".format(count))
            for description, count in counts.items()
        ]
        if len(threads) > _MAX_THREADS:
            lines.append("  ... and {} more".format(len(threads) - _MAX_THREADS))
        return lines


def unavailable_reason(rank: CaptureTarget, proc: str = PROC) -> str:
    """Return why this process cannot be sent the signal; "" if it can."""
    folder = "{}/{}/".format(proc, rank.pid)
    status = {}
    for line in _read_lines(folder + "status"):
        name, _, value = line.partition(":")
        status[name] = value.strip()
    if not status or status.get("State", "Z")[:1] in "ZX":
        return "the process has ended"
    if status["State"][:1] in "Tt":
        return "the process is stopped (SIGSTOP), so that nothing runs in it"
    if any(_mask_contains(status.get(mask, "0"), STACK_SIGNAL) for mask in ("SigBlk", "SigIgn")):
        return "the code blocks or ignores the signal that asks for it"
    if not _mask_contains(status.get("SigCgt", "0"), STACK_SIGNAL):
        return "the process does not run the interpreter yet, or no longer"
    if not _has_pipe_open(folder + "fd", rank.report_fd):
        return "the code has closed the pipe that the stack would be written to"
    return ""


def _mask_contains(mask: str, signal: int) -> bool:
    """Whether a hexadecimal signal mask of /proc contains this signal; bit 0 stands for signal 1."""
    return bool(int(mask, 16) >> (signal - 1) & 1)


def _has_pipe_open(folder: str, report_fd: int) -> bool:
    """Whether a process still has this pipe open, by the links in its /proc/<pid>/fd.

    If not, another file may have the pipe's descriptor, and the stack would be written into that file.
    """
    try:
        pipe = os.fstat(report_fd)
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        try:
            file = os.stat("{}/{}".format(folder, name))
        except OSError:
            continue  # closed meanwhile
        if os.path.samestat(file, pipe):
            return True
    return False


def stack_lines(text: str) -> List[str]:
    """Return the stacks in a rank's output, with an empty line between threads. Pure.

    Leaves out the platform's frames and all lines that faulthandler does not write.
    """
    lines: List[str] = []
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame and not frame.group(1).endswith(_PLATFORM_FILES):
            lines.append(line)
        elif line.startswith(("Thread 0x", "Current thread 0x")):
            lines += ["", line] if lines else [line]
        elif line.startswith("  ") and not frame:  # "  <no Python frame>", or "  ..." for frames that were left out
            lines.append(line)
    return lines


def main_frames(lines: Sequence[str]) -> List[Frame]:
    """Return the main thread's frames, the innermost first. Pure.

    The kernel delivers the signal to the main thread if possible, and faulthandler marks the thread that got the signal
    as current. If that thread has no Python frames, none is marked. Then the main thread is the last in the list, since
    faulthandler begins with the newest thread.
    """
    threads: List[List[Frame]] = []
    current: Optional[int] = None  # the index of the thread that is marked as current
    for line in lines:
        match = _FRAME.match(line)
        if match and threads:
            threads[-1].append(Frame(match.group(1), int(match.group(2)), match.group(3)))
        elif not match and line and not line.startswith(" "):
            current = len(threads) if line.startswith("Current") else current
            threads.append([])
    if not threads:
        return []
    return threads[-1 if current is None else current]


def rank_state(text: str) -> RankState:
    """Return what a rank was doing, from the stacks in its output. Pure."""
    lines = stack_lines(text)
    frames = main_frames(lines)
    if not frames:
        return RankState(digest="", waiting=NOT_WAITING, place="")
    waiting = NOT_WAITING
    for frame in frames[:_INNERMOST_FRAMES]:
        if _matches_any(frame, _WAITS):
            waiting = WAITING
        elif _matches_any(frame, _WAITS_IF_IDLE):
            waiting = max(waiting, WAITING_IF_IDLE)
    # The digest covers all threads: one that starts, moves or ends shows that the rank does not stand still.
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:_DIGEST_LENGTH]
    # The innermost frame of the customer's own code, or else the innermost frame.
    shown_frame = next((frame for frame in frames if not _is_library(frame.file)), frames[0])
    file_name = os.path.basename(shown_frame.file)
    place = "{}, line {}, {}".format(file_name, shown_frame.line, shown_frame.function)
    return RankState(digest, waiting, place[:_MAX_PLACE_LENGTH])


def _matches_any(frame: Frame, table: Sequence[Tuple[str, str]]) -> bool:
    """Whether a table such as `_WAITS` contains this frame's function."""
    for file_pattern, function_name in table:
        is_folder = file_pattern.endswith("/")
        matches_file = file_pattern in frame.file if is_folder else frame.file.endswith(file_pattern)
        if matches_file and function_name in ("", frame.function):
            return True
    return False


def _is_library(file: str) -> bool:
    return "/site-packages/" in file or "/lib/python" in file or file.startswith("<")  # <frozen importlib>, <string>


def _kernel_place(folder: str) -> str:
    """Return " in " and the kernel's function that this process or thread waits in; "" if it waits in none."""
    function = _read_text(folder + "/wchan")
    return "" if function in ("", "0") else " in " + function


def _read_lines(path: str) -> List[str]:
    return read_file(path).decode("utf-8", "replace").splitlines()


def _read_text(path: str) -> str:
    return read_file(path).decode("utf-8", "replace").strip()
