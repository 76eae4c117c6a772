"""Follow a job live: its state, its curves and the output of one rank, until it ends."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from .client import Client
from .decoding import decode
from .errors import ApiError, CliError, Unreachable
from .schemas import Job, Log
from .screen import Screen, clean, clean_output, money

RECONNECT_SECONDS = 1.0
"""Pause before a stream that ended early is opened again: long enough not to flood a console that restarts."""
TRIES = 30
"""Maximum tries in a row without an event. With their pauses they take half a minute, as a console's restart may."""
DRAIN_SECONDS = 10.0
"""How long to wait for the rest of the output after the job has ended, before the receipt is shown without it."""
MAX_LINE_LENGTH = 64 * 1024
"""Characters after which an incomplete line is printed, because it may never end."""


@dataclass
class JobView:
    """The latest known state and curve values of a job that is followed."""

    job: Job | None = None
    latest: dict[str, float] = field(default_factory=dict)
    """The newest value of each curve."""

    def apply_event(self, name: str, data: Any) -> None:
        """Update the state with an event of the job's stream."""
        if name == "state":
            self.job = decode(Job, data, "state")
        elif name == "metrics":
            for curve, points in decode(dict[str, tuple[tuple[float, ...], ...]], data, "metrics").items():
                if points and len(points[-1]) == 2:  # a step and a value; anything else is not a point
                    self.latest[curve] = points[-1][1]

    def description(self) -> str:
        """Return a line about the job's current state."""
        job = self.job
        if job is None:
            return "connecting"
        if job.waiting_for:
            return f"{job.state}: {job.waiting_for}"
        parts = [job.state]
        if job.progress.epochs:
            parts.append(f"epoch {job.progress.epoch}/{job.progress.epochs}")
        curve = "loss" if "loss" in self.latest else next(iter(self.latest), "")
        if curve:
            parts.append(f"{curve} {self.latest[curve]:.4g}")
        parts.append(money(job.cost_minor, job.currency))
        return " · ".join(parts)


class Watch:
    """Follows one job, and with `with_logs` the output of its rank 0. After Ctrl-C, `follow` can be called again."""

    def __init__(
        self,
        client: Client,
        job_id: int,
        screen: Screen,
        *,
        with_logs: bool = True,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._job_id, self._screen, self._pause = client, job_id, screen, pause
        self._view = JobView()
        self._print_line: Callable[[str], None] = lambda _line: None
        self._may_print = threading.Event()  # not set while a question to the user is on the screen
        self._logs = LogFollower(client, job_id, self._print, pause) if with_logs else None

    def follow(self) -> Job:
        """Show the job until it has ended, and return the ended job. Raises CliError, and KeyboardInterrupt."""
        view = self._view
        try:
            with _show_progress(self._screen) as display:
                self._print_line = display.print_line
                self._may_print.set()
                if view.job:  # after Ctrl-C
                    display.update(view.description(), view.job.progress.fraction)
                for _event in _follow_events(self._client, self._job_id, view, self._pause):
                    display.update(view.description(), view.job.progress.fraction if view.job else 0.0)
                    if self._logs and view.job:
                        self._logs.follow_attempts(
                            [attempt.number for attempt in view.job.attempts if attempt.started_at]
                        )
                if self._logs:
                    self._logs.drain(DRAIN_SECONDS)
        finally:
            self._may_print.clear()
        assert view.job is not None  # noqa: S101  # the stream ends with the state of an ended job
        return view.job

    def close(self) -> None:
        """Print no more output."""
        if self._logs:
            self._logs.stop()
        self._print_line = lambda _line: None
        self._may_print.set()  # a thread that waits in `_print` can then end

    def _print(self, line: str) -> None:
        """Print a line of output, but not while a question is on the screen. The log thread calls this."""
        self._may_print.wait()
        self._print_line(line)


def _follow_events(client: Client, job_id: int, view: JobView, pause: Callable[[float], None]) -> Iterator[None]:
    """Apply the events of the job's stream to `view`, and yield after each of them. Reconnect until the job has ended.

    Raises ApiError for a refused request, Unreachable or ApiError after TRIES tries without an event.
    """
    tries = 0
    while not (view.job and view.job.finished_at):
        try:
            for event in client.job_events(job_id):
                tries = 0
                view.apply_event(*event)
                yield
            last_error: Exception | None = None
        except (Unreachable, ApiError) as error:
            if isinstance(error, ApiError) and error.status < 500:
                raise
            last_error = error
        if not (view.job and view.job.finished_at):
            tries += 1
            if tries == TRIES:
                raise last_error or Unreachable("The live stream ended although the job goes on. Try again later.")
            pause(RECONNECT_SECONDS)


class LogFollower:
    """Prints the output of rank 0, one attempt after the other, on a thread of its own."""

    def __init__(
        self, client: Client, job_id: int, print_line: Callable[[str], None], pause: Callable[[float], None]
    ) -> None:
        self._client, self._job_id, self._print, self._pause = client, job_id, print_line, pause
        self._last_attempt = 0
        self._attempts = queue.SimpleQueue[int | None]()  # None ends the thread
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def follow_attempts(self, numbers: list[int]) -> None:
        """Queue the attempts among `numbers` that are new. The thread prints one attempt's output after another's."""
        for number in numbers:
            if number > self._last_attempt:
                self._last_attempt = number
                self._attempts.put(number)

    def drain(self, seconds: float) -> None:
        """Wait until all output of the ended job is printed, or for `seconds`."""
        self._attempts.put(None)
        self._thread.join(seconds)

    def stop(self) -> None:
        """Print no more."""
        self._is_stopped.set()
        self._attempts.put(None)

    def _run(self) -> None:
        """Print the output of each attempt in the queue, until None (the thread's function)."""
        while (attempt := self._attempts.get()) is not None:
            # If the console fails, `Watch` meets the error too, since it follows the job's state.
            with suppress(CliError):
                for line in lines(self._client, self._job_id, rank=0, attempt=attempt, pause=self._pause):
                    if self._is_stopped.is_set():
                        return
                    self._print(line.text)


class Line(NamedTuple):
    """A line of output, and the Unix time when it was written. None: not known, or not asked for."""

    text: str
    time: float | None = None


def add_part(incomplete: Line, part: Log) -> list[Line]:
    """Return the lines of the next part of an output. The last of them may be incomplete.

    `incomplete` is the last line of the part before, which this part continues.
    """
    times = {int(pair[0]): pair[1] for pair in part.times if len(pair) == 2}
    result, written_at = list[Line](), None
    for number, text in enumerate(part.text.split("\n")):
        written_at = times.get(number, written_at)
        result.append(Line(text, written_at))
    if incomplete.text:
        result[0] = Line(incomplete.text + result[0].text, incomplete.time)
    return result


def lines(
    client: Client,
    job_id: int,
    *,
    rank: int,
    attempt: int | None,
    timestamps: bool = False,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[Line]:
    """Yield the lines of a rank's output as they are written, until the output ends.

    Reconnects after an interruption. Raises ApiError for a refused request, Unreachable or ApiError after TRIES tries
    without an event.
    """
    offset, incomplete, tries, is_ended = 0, Line(""), 0, False
    while not is_ended:
        last_error: Unreachable | ApiError | None = None
        try:
            for event in client.log_events(job_id, rank=rank, attempt=attempt, offset=offset, timestamps=timestamps):
                part = decode(Log, event.data, "log")
                offset, is_ended, tries = part.next_offset, part.eof, 0
                *complete, incomplete = add_part(incomplete, part)
                yield from complete
                if len(incomplete.text) > MAX_LINE_LENGTH:
                    yield incomplete
                    incomplete = Line("")
        except (Unreachable, ApiError) as error:
            last_error = error
        if not is_ended:
            tries += 1
            if tries == TRIES or (isinstance(last_error, ApiError) and last_error.status < 500):
                if incomplete.text:
                    yield incomplete
                raise last_error or Unreachable("The live stream ended before the output did. Try again later.")
            pause(RECONNECT_SECONDS)
    if incomplete.text:
        yield incomplete


class _Display(NamedTuple):
    """Functions that show a job: `update` its description and its progress (0 to 1), `print_line` a line of output."""

    update: Callable[[str, float], None]
    print_line: Callable[[str], None]


@contextmanager
def _show_progress(screen: Screen) -> Iterator[_Display]:
    """Yield the functions that show a job on the screen.

    On a terminal, a progress bar stays below the output. Elsewhere, each new state is printed as a line.
    """
    console = screen.console
    print_line = lambda line: console.print(Text.from_ansi(clean_output(line)))
    if not console.is_terminal:
        last_state = ""

        def update(description: str, _fraction: float) -> None:
            nonlocal last_state
            state = description.partition(" · ")[0]
            if state != last_state:
                last_state = state
                console.print(Text(clean(state)))

        yield _Display(update, print_line)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("connecting", total=1.0)
        show = lambda description, fraction: bar.update(task, description=clean(description), completed=fraction)
        yield _Display(show, print_line)
