"""A Pod's output: the same bytes in the run's folder and on stdout, limited, and never blocking the run."""

import os
import random
import selectors
import zipfile

import pytest

from runtime.launcher.pod import log_mux as module
from runtime.launcher.pod.log_mux import LogMux

pytestmark = pytest.mark.late("its pods are real processes, with time limits of seconds")


def output_of_rank(stdout, rank):
    """Extract a rank's output from the Pod's."""
    whole, piece = str(rank).encode(), b"%d+" % rank
    result = []
    for line in stdout.split(b"\n")[:-1]:
        name, _, text = line.partition(b"\t")
        if name == whole:
            result += [text, b"\n"]
        elif name == piece:
            result.append(text)
    return b"".join(result)


def test_output_is_the_same_in_both_places_byte_for_byte_up_to_the_limit(cluster):
    source = """
    import os, random, sys
    if os.environ["RANK"] == "1":
        for number in range(200_000): print("a line that is one of very many", number)
        sys.exit()
    made = random.Random(0)
    for _ in range(300):
        data = made.randbytes(made.choice([1, 30, 4000, 20000]))
        sys.stdout.buffer.write(data.replace(b"\\n", b"\\r") + made.choice([b"", b"\\n", b"\\n\\n"]))
        sys.stdout.buffer.flush()
    sys.stdout.buffer.write(b"no end")
    """
    limit = 4 << 20
    (pod,) = cluster.start(source, plan={"workers": 2}, log_limit_bytes=limit)
    assert pod.wait() == 0
    created = random.Random(0)
    written = b""
    for _ in range(300):
        data = created.randbytes(created.choice([1, 30, 4000, 20000]))
        written += data.replace(b"\n", b"\r") + created.choice([b"", b"\n", b"\n\n"])
    stored, cut = ((cluster.root / "logs" / f"rank-{rank}.log").read_bytes() for rank in range(2))
    assert stored == written + b"no end"
    assert len(cut) < limit + 1000
    assert b"[trainyard] This rank's log has reached its limit" in cut
    for rank, content in enumerate((stored, cut)):
        assert output_of_rank(pod.stdout.read_bytes(), rank) == content


def test_a_closed_stdout_does_not_fail_the_run(cluster):
    reading, writing = os.pipe()
    os.close(reading)
    cluster.stdout = writing
    (pod,) = cluster.start("for number in range(50_000): print('a line', number)")
    os.close(writing)
    assert pod.wait() == 0
    assert cluster.log().endswith("a line 49999\n")


@pytest.mark.slow
def test_unwritable_storage_is_reported_and_not_fatal(cluster):
    cluster.storage = ["--size", "65536", "--tmpfs", "/trainyard/run-root"]
    (pod,) = cluster.start("for number in range(10_000): print('a line', number)")
    assert pod.wait() == 0
    record = pod.record
    assert "No space left on device" in record["detail"]
    assert (record["exit_code"], record["causes"]) == (0, [])
    assert output_of_rank(pod.stdout.read_bytes(), 0).endswith(b"a line 9999\n")


HELD_OUTPUT = "from launcher.ranklog import RankLog; RankLog._append = lambda self, data: time.sleep(1000)"
HELD_RECORD = """
from launcher.record import Record
write = Record._write
Record._write = lambda self: time.sleep(1000) if self.phase == "ended" else write(self)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("held", "source", "causes"),
    [
        (HELD_OUTPUT, "print('held', flush=True); import time; time.sleep(600)", [("time_limit", "time_limit")]),
        (HELD_RECORD, "print('fine')", []),
    ],
    ids=["while it runs", "at its last record"],
)
def test_blocked_storage_does_not_delay_the_end_of_a_run(cluster, held, source, causes):
    with zipfile.ZipFile(cluster.archive) as archive:
        sources = {name: archive.read(name) for name in archive.namelist()}
    entry = f"import time\n{held}\nfrom launcher.__main__ import start\nstart()"
    with zipfile.ZipFile(cluster.archive, "w") as archive:
        for name, module in {**sources, "__main__.py": entry.encode()}.items():
            archive.writestr(name, module)
    (pod,) = cluster.start(source, deadline_seconds=3)
    assert pod.wait(60) == (1 if causes else 0)
    assert pod.causes == causes
    assert ("did not respond" in pod.record["detail"]) is bool(causes)


# Without a pod


class Listener:
    """A LogMux, and the other end of its pipe."""

    def __init__(self):
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self.selector = selectors.DefaultSelector()
        self.log_mux = LogMux(self.selector, self.writing)

    def read(self):
        received = b""
        while True:
            try:
                received += os.read(self.reading, 1 << 20)
            except BlockingIOError:
                return received


@pytest.fixture
def listener():
    created = Listener()
    yield created
    created.selector.close()
    for descriptor in (created.reading, created.writing):
        os.close(descriptor)


def test_long_lines_are_written_in_pieces_that_the_kubelet_does_not_split(listener):
    output = b"x" * 20_000 + b"\nshort\n\n" + b"y" * 20_000
    for data in (output, b"\n"):
        listener.log_mux.write(0, data)
    received = listener.read()
    assert output_of_rank(received, 0) == output + b"\n"
    assert max(map(len, received.split(b"\n"))) < 16 * 1024


def test_a_slow_reader_of_stdout_slows_ranks_and_then_misses_output(listener, monkeypatch):
    line = b"x" * 999 + b"\n"
    for _ in range(2000):
        listener.log_mux.write(0, line)
    assert listener.log_mux.is_full
    assert listener.selector.get_map()
    monkeypatch.setattr(module, "STALL_SECONDS", -1.0)
    assert not listener.log_mux.is_full
    for _ in range(2000):
        listener.log_mux.write(0, line)
    monkeypatch.undo()
    received = b""
    for _ in range(100):
        received += listener.read()
        listener.log_mux.flush()
    assert received.count(line) < 4000
    assert received.endswith(b"-\t[trainyard] Output is missing here because nothing read it.\n")
    assert not listener.selector.get_map(), "nobody is woken for nothing"
