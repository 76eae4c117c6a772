"""Where ranks stand: the stacks of every thread, and what the kernel says of their processes.

A rank's interpreter writes its stacks to the pipe that it shares with the launcher when it gets STACK_SIGNAL (`rank`).
The one rule: the signal is only sent to a process that will handle it, and into that very pipe; to any other it would
be death. Whatever comes back is the customer's own word about the customer's own code: shown, capped, never believed.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .processes import send_signal
from .progress import NOT_WAITING, WAITING, WAITING_IF_IDLE, Stand
from .rank import STACK_SIGNAL
from .sampling import PROC, Process, read_file

LARGEST_TEXT = 128 << 10
"""Of a rank, in characters. One that is no text is six bytes of JSON, and the message must fit in a line (`report`):
else the supervisor hears the launcher no more, and the run passes for a lost node."""
LONGEST_SECONDS = 2.0
"""How long a rank gets to answer."""
_QUIET_SECONDS = 0.15
"""A rank's stacks have no end mark: they are whole when nothing more has come for so long."""
_MOST_CHILDREN = 32
_MOST_THREADS = 512
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_INNERMOST = 4
_OURS = ("/launcher/rank.py", "/launcher/steps.py", "/launcher/zygote.py")
# Calls that only wait: for the other ranks, or for a device that may wait for them. By the end of the file's name.
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
# Calls that wait inside for the others, and that compute as well.
_WAITS_IF_IDLE = (
    ("torch/autograd/graph.py", "_engine_run_backward"),
    ("torch/nn/parallel/distributed.py", ""),
    ("tensorflow/python/eager/execute.py", "quick_execute"),
)
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk",
    "T": "stopped by a signal",
    "t": "stopped by a tracer",
    "Z": "ended, not yet reaped",
    "X": "dead",
    "I": "idle",
}


class Asked(NamedTuple):
    """A rank to look at: its process, and the launcher's end of the pipe it writes to."""

    pid: int
    pipe: int


class Look:
    """One look at some ranks. `begin` asks them, `feed` takes what they write, `is_over` says when that was all."""

    def __init__(self, ranks: Mapping[int, Asked], proc: str = PROC) -> None:
        self._ranks = dict(ranks)
        self._proc = proc
        self._said: Dict[int, bytes] = {}
        self._refused: Dict[int, str] = {}
        self._begun_at = 0.0
        self._heard_at: Dict[int, float] = {}

    def begin(self, now: float) -> None:
        """Ask every rank that can answer."""
        self._begun_at = now
        for seat, rank in self._ranks.items():
            why = why_not(rank, self._proc)
            if why:
                self._refused[seat] = why
            else:
                self._said[seat] = b""
                send_signal(rank.pid, STACK_SIGNAL)

    def feed(self, seat: int, data: bytes, now: float) -> None:
        """What a rank has written; what is no stack (a rank's last word, say) is sorted out later."""
        if seat in self._said:
            self._said[seat] = (self._said[seat] + data)[:LARGEST_TEXT]
            self._heard_at[seat] = now

    def ends_at(self) -> float:
        """When the look is over, if nothing more comes."""
        latest = self._begun_at
        for seat in self._said:
            heard = self._heard_at.get(seat)
            latest = max(latest, self._begun_at + LONGEST_SECONDS if heard is None else heard + _QUIET_SECONDS)
        return min(latest, self._begun_at + LONGEST_SECONDS)

    def is_over(self, now: float) -> bool:
        """Whether all has come that will."""
        return now >= self.ends_at()

    def stands(self) -> Dict[int, Stand]:
        """Where each rank stands; one that says nothing stands nowhere, and is not known to wait."""
        return {seat: stand(self._said.get(seat, b"").decode("utf-8", "replace")) for seat in self._ranks}

    def texts(self, processes: Mapping[int, Process], owned: Mapping[int, Sequence[int]]) -> Dict[int, str]:
        """What to show of each rank. `owned`: the processes of each rank, itself among them."""
        return {seat: self._text(seat, processes, owned.get(seat, ())) for seat in self._ranks}

    def _text(self, seat: int, processes: Mapping[int, Process], owned: Sequence[int]) -> str:
        pid = self._ranks[seat].pid
        lines = ["Rank {}: {}".format(seat, self._process(processes.get(pid), pid)), ""]
        stacks = stack_lines(self._said.get(seat, b"").decode("utf-8", "replace"))
        if stacks:
            lines += stacks
        else:
            why = self._refused.get(seat) or "it did not answer within {:g} seconds".format(LONGEST_SECONDS)
            lines.append("No stack could be taken: {}.".format(why))
        lines += ["", "Threads, as the kernel sees them:", *self._threads(pid)]
        children = [child for child in owned if child != pid]
        if children:
            lines += ["", "Other processes of this rank:"]
            lines += ["  " + self._process(processes.get(child), child) for child in children[:_MOST_CHILDREN]]
            if len(children) > _MOST_CHILDREN:
                lines.append("  ... and {} more".format(len(children) - _MOST_CHILDREN))
        return "\n".join(lines)[:LARGEST_TEXT] + "\n"

    def _process(self, process: Optional[Process], pid: int) -> str:
        if process is None:
            return "process {} has ended".format(pid)
        name = _text_of("{}/{}/comm".format(self._proc, pid))
        state = _STATES.get(process.state, process.state)
        where = _text_of("{}/{}/wchan".format(self._proc, pid))
        inside = " in {}".format(where) if where not in ("", "0") else ""
        return "process {} ({}), {}{}, {:.2f} s of CPU".format(pid, name, state, inside, process.cpu)

    def _threads(self, pid: int) -> List[str]:
        folder = "{}/{}/task".format(self._proc, pid)
        try:
            threads = sorted(map(int, os.listdir(folder)))
        except OSError:
            return ["  none can be seen"]
        alike: Dict[Tuple[str, str], int] = {}
        for thread in threads[:_MOST_THREADS]:
            name = _text_of("{}/{}/comm".format(folder, thread))
            where = _text_of("{}/{}/wchan".format(folder, thread))
            alike[name, where] = alike.get((name, where), 0) + 1
        lines = [
            "  {}{}{}".format(
                name, "" if where in ("", "0") else " in " + where, "" if many == 1 else ", {} of them".format(many)
            )
            for (name, where), many in alike.items()
        ]
        if len(threads) > _MOST_THREADS:
            lines.append("  ... and {} more".format(len(threads) - _MOST_THREADS))
        return lines


def why_not(rank: Asked, proc: str = PROC) -> str:
    """Why this process can't be asked; empty where it can."""
    folder = "{}/{}/".format(proc, rank.pid)
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in _lines(folder + "status"))}
    if not status or status.get("State", "Z")[:1] in "ZX":
        return "the process has ended"
    if status["State"][:1] in "Tt":
        return "the process is stopped (SIGSTOP), so that nothing runs in it"
    if not _has(status.get("SigCgt", "0"), STACK_SIGNAL):
        return "the process no longer runs the interpreter that was started, or not yet"
    if _has(status.get("SigBlk", "0"), STACK_SIGNAL) or _has(status.get("SigIgn", "0"), STACK_SIGNAL):
        return "the code does not let the signal through that asks for it"
    if not _holds(folder + "fd", rank.pipe):
        return "the code has closed the pipe that the stack would be written to"
    return ""


def _has(mask: str, signal: int) -> bool:
    return bool(int(mask, 16) >> (signal - 1) & 1)


def _holds(folder: str, pipe: int) -> bool:
    """Whether a process still has the other end of this pipe: else its stack would go to whatever has the number."""
    try:
        ours = os.fstat(pipe)
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        try:
            theirs = os.stat("{}/{}".format(folder, name))
        except OSError:
            continue
        if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
            return True
    return False


def stack_lines(text: str) -> List[str]:
    """The lines of a rank's word that are stacks, the threads apart from each other. PURE.

    Frames of ours, below and between those of the script, are left out.
    """
    lines: List[str] = []
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame and not frame.group(1).endswith(_OURS):
            lines.append(line)
        elif line.startswith(("Thread 0x", "Current thread 0x")):
            lines += ["", line] if lines else [line]
        elif line.startswith("  ") and not frame:
            lines.append(line)
    return lines


def main_frames(lines: Sequence[str]) -> List[Tuple[str, int, str]]:
    """File, line and function of the first thread's frames, the innermost first. PURE.

    The thread that got the signal is the current one, and the kernel prefers the first; without a current one (a thread
    that is not Python's got it) the first thread is shown last.
    """
    threads: List[List[Tuple[str, int, str]]] = []
    current: Optional[int] = None
    for line in lines:
        frame = _FRAME.match(line)
        if frame and threads:
            threads[-1].append((frame.group(1), int(frame.group(2)), frame.group(3)))
        elif not frame and line and not line.startswith(" "):
            current = len(threads) if line.startswith("Current") else current
            threads.append([])
    if not threads:
        return []
    return threads[-1 if current is None else current]


def stand(text: str) -> Stand:
    """What a rank's word says of where it stands. PURE."""
    lines = stack_lines(text)
    frames = main_frames(lines)
    if not frames:
        return Stand("", NOT_WAITING, "")
    waits = NOT_WAITING
    for file, _line, function in frames[:_INNERMOST]:
        if _is_one_of(file, function, _WAITS):
            waits = WAITING
        elif _is_one_of(file, function, _WAITS_IF_IDLE):
            waits = max(waits, WAITING_IF_IDLE)
    # Threads without a frame of Python come and go in the list; identifiers of threads are kept out of what is shown.
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    file, line, function = next((frame for frame in frames if not _is_library(frame[0])), frames[0])
    return Stand(digest, waits, "{}, line {}, {}".format(os.path.basename(file), line, function)[:200])


def _is_one_of(file: str, function: str, calls: Sequence[Tuple[str, str]]) -> bool:
    for known, name in calls:
        inside = known in file if known.endswith("/") else file.endswith(known)
        if inside and name in ("", function):
            return True
    return False


def _is_library(file: str) -> bool:
    return "/site-packages/" in file or "/lib/python" in file or file.startswith("<")


def _lines(path: str) -> List[str]:
    return read_file(path).decode("utf-8", "replace").splitlines()


def _text_of(path: str) -> str:
    return read_file(path).decode("utf-8", "replace").strip()
