from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.launcher import speaker as module
from runtime.launcher.output import PLATFORM
from runtime.launcher.speaker import Speaker


class Listener:
    """The other end of a speaker's pipe."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self.selector = selectors.DefaultSelector()
        self.speaker = Speaker(self.selector, self.writing)

    def hear(self) -> bytes:
        heard = b""
        while True:
            try:
                heard += os.read(self.reading, 1 << 20)
            except BlockingIOError:
                return heard


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.selector.close()
    for descriptor in (made.reading, made.writing):
        os.close(descriptor)


def test_lines_carry_their_rank(listener: Listener) -> None:
    listener.speaker.say(3, b"one\ntwo\nthr")
    listener.speaker.say(0, b"other\n")
    listener.speaker.say(3, b"ee\n")
    listener.speaker.say(PLATFORM, b"ours\n")
    assert listener.hear() == b"3\tone\n3\ttwo\n0\tother\n3\tthree\n-\tours\n"


def test_what_does_not_end_is_said_after_a_moment(listener: Listener) -> None:
    listener.speaker.say(1, b"a prompt: ")
    listener.speaker.keep_time(time.monotonic())
    assert listener.hear() == b""
    listener.speaker.keep_time(time.monotonic() + 2)
    listener.speaker.say(1, b"answered\n")
    assert listener.hear() == b"1+\ta prompt: \n1\tanswered\n"


def test_a_line_without_an_end_comes_in_pieces(listener: Listener) -> None:
    listener.speaker.say(1, b"x" * 20_000)
    listener.speaker.finish(1)
    lines = listener.hear().split(b"\n")[:-1]
    assert all(line.startswith(b"1+\t") for line in lines)
    assert b"".join(line[3:] for line in lines) == b"x" * 20_000


def test_who_does_not_listen_slows_it_down_and_then_misses_something(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = b"x" * 999 + b"\n"
    for _ in range(2000):
        listener.speaker.say(0, line)
    assert listener.speaker.full
    assert listener.selector.get_map()
    monkeypatch.setattr(module, "STALL_SECONDS", -1.0)
    assert not listener.speaker.full
    for _ in range(2000):
        listener.speaker.say(0, line)
    monkeypatch.undo()
    heard = b""
    for _ in range(100):
        heard += listener.hear()
        listener.speaker.flush()
    assert heard.count(line) < 4000
    assert heard.endswith(b"-\t[trainyard] Output is missing here: nobody took it.\n")
    assert not listener.selector.get_map(), "nobody is woken for nothing"


def test_who_has_hung_up_is_not_spoken_to(listener: Listener) -> None:
    replaced, other = os.pipe()
    os.dup2(replaced, listener.reading)
    os.close(replaced)
    listener.speaker.say(0, b"lost\n" * 100_000)
    assert not listener.speaker.full
    listener.speaker.finish(5)
    os.close(other)


def test_a_file_takes_everything(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file, selectors.DefaultSelector() as selector:
        speaker = Speaker(selector, file.fileno())
        speaker.say(0, b"line\n" * 100_000)
        speaker.finish(1)
    assert (tmp_path / "out").read_bytes() == b"0\tline\n" * 100_000
