"""A pod's output: byte for byte in the run's folder and on stdout, capped, and never a reason to stand still."""

from __future__ import annotations

import os
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.launcher.pods import Cluster, has_bubblewrap

pytestmark = pytest.mark.skipif(not has_bubblewrap(), reason="needs bubblewrap")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def together(stdout: bytes, rank: int) -> bytes:
    """A rank's output, put together again from the pod's."""
    whole, piece = str(rank).encode(), b"%d+" % rank
    found = []
    for line in stdout.split(b"\n")[:-1]:
        name, _, text = line.partition(b"\t")
        if name == whole:
            found += [text, b"\n"]
        elif name == piece:
            found.append(text)
    return b"".join(found)


def test_output_is_the_same_in_both_places_byte_for_byte(cluster: Cluster) -> None:
    source = """
    import os, random, sys
    made = random.Random(int(os.environ["RANK"]))
    for _ in range(300):
        data = made.randbytes(made.choice([1, 30, 4000, 20000]))
        sys.stdout.buffer.write(data.replace(b"\\n", b"\\r") + made.choice([b"", b"\\n", b"\\n\\n"]))
        sys.stdout.buffer.flush()
    sys.stdout.buffer.write(b"no end")
    """
    (pod,) = cluster.start(source, plan={"workers": 2}, log_limit_bytes=1 << 26)
    assert pod.wait() == 0
    for rank in range(2):
        made = random.Random(rank)
        written = b""
        for _ in range(300):
            data = made.randbytes(made.choice([1, 30, 4000, 20000]))
            written += data.replace(b"\n", b"\r") + made.choice([b"", b"\n", b"\n\n"])
        stored = (cluster.root / "logs" / f"rank-{rank}.log").read_bytes()
        assert stored == written + b"no end"
        assert together(pod.stdout.read_bytes(), rank) == stored


def test_a_flood_is_cut_in_both_places_and_the_run_goes_on(cluster: Cluster) -> None:
    source = """
    for number in range(200_000): print("a line that is one of very many", number)
    """
    (pod,) = cluster.start(source, log_limit_bytes=100_000)
    assert pod.wait() == 0
    stored = (cluster.root / "logs" / "rank-0.log").read_bytes()
    assert len(stored) < 101_000
    assert b"[trainyard] This rank's log has reached its limit" in stored
    assert together(pod.stdout.read_bytes(), 0) == stored


def test_a_prompt_without_an_end_is_shown_while_the_code_waits(cluster: Cluster) -> None:
    cluster.start("import time; print('10%|', end='', flush=True); time.sleep(600)")
    cluster.wait_for(lambda: "0+\t10%|\n" in cluster.pods[0].printed())


def test_a_closed_stdout_is_no_reason_to_fail(cluster: Cluster) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    cluster.stdout = writing
    (pod,) = cluster.start("for number in range(50_000): print('a line', number)")
    os.close(writing)
    assert pod.wait() == 0
    assert cluster.log().endswith("a line 49999\n")


def test_a_stdout_that_nobody_reads_holds_the_run_up_for_a_moment_only(cluster: Cluster) -> None:
    reading, writing = os.pipe()
    cluster.stdout = writing
    try:
        (pod,) = cluster.start(
            "for number in range(300_000): print('a line', number)", log_limit_bytes=1 << 26, deadline_seconds=100
        )
        os.close(writing)
        assert pod.wait(90) == 0
    finally:
        os.close(reading)
    assert cluster.log().endswith("a line 299999\n")
    assert pod.record["causes"] == []


def test_a_slow_reader_of_stdout_misses_nothing(cluster: Cluster) -> None:
    reading, writing = os.pipe()
    cluster.stdout = writing
    (pod,) = cluster.start("for number in range(300_000): print('a line', number)", log_limit_bytes=1 << 26)
    os.close(writing)
    seen = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while data := pipe.read(8192):
            seen += data
    assert pod.wait() == 0
    assert together(seen, 0) == (cluster.root / "logs" / "rank-0.log").read_bytes()


@pytest.mark.parametrize(
    ("storage", "problem"),
    [
        (["--tmpfs", "/trainyard/run-root", "--remount-ro", "/trainyard/run-root"], "Read-only file system"),
        (["--size", "65536", "--tmpfs", "/trainyard/run-root"], "No space left on device"),
    ],
    ids=["read-only", "full"],
)
def test_storage_that_takes_nothing_is_told_and_not_fatal(cluster: Cluster, storage: list[str], problem: str) -> None:
    cluster.storage = storage
    (pod,) = cluster.start("for number in range(10_000): print('a line', number)")
    assert pod.wait() == 0
    record = pod.record
    assert re.search(problem, record["detail"])
    assert (record["exit_code"], record["causes"]) == (0, [])
    assert together(pod.stdout.read_bytes(), 0).endswith(b"a line 9999\n")


def test_a_record_with_much_to_say_still_fits(cluster: Cluster) -> None:
    source = """
    import sys
    for number in range(40): print("\u7ecf" * 2000, number)
    raise ValueError("x" * 5000)
    """
    (pod,) = cluster.start(source, 1, plan={"workers": 8})
    assert pod.wait() == 1
    cause = pod.record["causes"][0]
    assert (cause["kind"], cause["exit_code"]) == ("code_failed", 1)


HELD_OUTPUT = "from launcher.ranklog import RankLog; RankLog._append = lambda self, data: time.sleep(1000)"
HELD_RECORD = """
from launcher.record import Record
write = Record._write
Record._write = lambda self: time.sleep(1000) if self.phase == "ended" else write(self)
"""


@pytest.mark.parametrize(
    ("held", "source", "causes"),
    [
        (HELD_OUTPUT, "print('held', flush=True); import time; time.sleep(600)", [("time_limit", "time_limit")]),
        (HELD_OUTPUT, "print('held', flush=True)", [("time_limit", "time_limit")]),
        (HELD_RECORD, "print('fine')", []),
    ],
    ids=["while it runs", "when it has ended", "at its last record"],
)
def test_storage_that_stands_still_keeps_no_run_from_its_end(
    cluster: Cluster, held: str, source: str, causes: list[tuple[str, str]]
) -> None:
    with zipfile.ZipFile(cluster.archive) as archive:
        sources = {name: archive.read(name) for name in archive.namelist()}
    entry = f"import time\n{held}\nfrom launcher.__main__ import start\nstart()"
    with zipfile.ZipFile(cluster.archive, "w") as archive:
        for name, module in {**sources, "__main__.py": entry.encode()}.items():
            archive.writestr(name, module)
    (pod,) = cluster.start(source, deadline_seconds=3)
    assert pod.wait(60) == (1 if causes else 0)
    assert pod.causes == causes
    assert ("stood still" in pod.record["detail"]) is bool(causes)
