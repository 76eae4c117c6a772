"""What a Pod's first process writes to stdout for its ranks, and what happens if nobody reads it."""

import os
import selectors

import pytest

from runtime.backends.kubernetes.logs import extract_rank
from runtime.launcher.pod import log_mux as module
from runtime.launcher.pod.log_mux import LogMux

LINE = b"x" * 999 + b"\n"


class Listener:
    """A LogMux, and the other end of its pipe."""

    def __init__(self):
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self.reading, self.writing = os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)
        self.selector = selectors.DefaultSelector()
        self.log_mux = LogMux(self.selector, writing)

    def read(self):
        return b"".join(iter(lambda: self.reading.read(1 << 20), None))

    def flood(self):
        """Write 2000 lines, more than the pipe and the buffer hold."""
        for _ in range(2000):
            self.log_mux.write(0, LINE)


@pytest.fixture
def listener():
    created = Listener()
    yield created
    for each in (created.selector, created.reading, created.writing):
        each.close()


def test_long_lines_are_written_in_pieces_that_the_kubelet_does_not_split(listener):
    output = b"x" * 20_000 + b"\nshort\n\n" + b"y" * 20_000
    for data in (output, b"\n"):
        listener.log_mux.write(0, data)
    received = listener.read()
    assert extract_rank([received], rank=0, offset=0, limit=1 << 20)[0] == output + b"\n"
    assert max(map(len, received.split(b"\n"))) < 16 * 1024


def test_a_slow_reader_of_stdout_slows_ranks_and_then_misses_output(listener, monkeypatch):
    listener.flood()
    assert listener.log_mux.is_full
    assert listener.selector.get_map(), "it waits until stdout is writable"
    monkeypatch.setattr(module, "STALL_SECONDS", -1.0)  # the reader has been slow for too long
    assert not listener.log_mux.is_full
    listener.flood()
    monkeypatch.undo()
    received = b""
    for _ in range(100):  # more than it takes to read everything
        received += listener.read()
        listener.log_mux.flush()
    assert received.count(LINE) < 4000, "of both floods"
    # The platform's own lines have "-" where others have the rank.
    assert received.endswith(b"-\t[trainyard] Output is missing here because nothing read it.\n")
    assert not listener.selector.get_map(), "a writable stdout would wake the process again and again"


def test_a_stdout_that_is_closed_slows_no_rank(listener):
    listener.flood()
    listener.reading.close()
    listener.log_mux.flush()
    listener.flood()
    assert not listener.log_mux.is_full
    assert not listener.selector.get_map(), "a closed stdout would wake the process again and again"
