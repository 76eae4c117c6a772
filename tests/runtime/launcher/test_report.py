from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.launcher.report import LONGEST_LINE, ConnectionLost, Link, cause, first_cause


def failed(at: float, rank: int, signal: str = "") -> dict[str, Any]:
    return {"kind": "code_failed", "at": at, "rank": rank, "signal": signal}


@pytest.mark.parametrize(
    ("causes", "first"),
    [
        ([], None),
        ([failed(5, 1), failed(4, 0)], 0),
        ([failed(5.0, 1), failed(5.3, 0, "SIGKILL")], 1),
        ([failed(5.0, 1), failed(6.5, 0, "SIGKILL")], 0),
        ([failed(5.0, 1), failed(5.3, 0, "SIGABRT")], 0),
        ([failed(5.0, 1), failed(5.1, 0, "SIGTERM"), failed(5.2, 2, "SIGSEGV")], 2),
        ([{"kind": "time_limit", "at": 5.0}, failed(5.1, 0, "SIGKILL")], 0),
        # A peer of a node that was lost fails by it, and may be reaped first.
        ([failed(5.1, 0), {"kind": "node_lost", "at": 5.2}], 1),
        ([failed(5.1, 0), {"kind": "node_lost", "at": 6.2}], 0),
        ([failed(5.1, 0), {"kind": "node_lost", "at": 5.2}, failed(5.3, 1, "SIGKILL")], 2),
        ([failed(5.1, 0, "SIGSEGV"), {"kind": "node_lost", "at": 5.2}], 0),
    ],
)
def test_first_cause(causes: list[dict[str, Any]], first: int | None) -> None:
    assert first_cause(causes) is (None if first is None else sorted(causes, key=lambda cause: cause["at"])[first])


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Link]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield theirs, Link(ours)


def test_lines_come_whole(ends: tuple[socket.socket, Link]) -> None:
    theirs, link = ends
    assert link.receive() == []
    theirs.sendall(b'{"a": 1}\n{"b"')
    assert link.receive() == [{"a": 1}]
    theirs.sendall(b": 2}\n")
    assert link.receive() == [{"b": 2}]


def test_what_is_no_object_is_left_out(ends: tuple[socket.socket, Link]) -> None:
    theirs, link = ends
    theirs.sendall(b'\xff\n[1]\n\n"x"\n{}\n')
    assert link.receive() == [{}]


def test_a_line_without_an_end_breaks_the_connection(ends: tuple[socket.socket, Link]) -> None:
    theirs, link = ends
    for _piece in range(LONGEST_LINE // 50_000):
        theirs.sendall(b"x" * 50_000)
        assert link.receive() == []
    theirs.sendall(b"x" * 50_000)
    with pytest.raises(ConnectionLost, match="without an end"):
        link.receive()


def test_a_line_of_nearly_a_mebibyte_comes_whole(ends: tuple[socket.socket, Link]) -> None:
    theirs, link = ends
    text = "x" * (LONGEST_LINE - 20)
    line = json.dumps({"a": text}).encode() + b"\n"
    found: list[dict[str, Any]] = []
    for at in range(0, len(line), 50_000):
        theirs.sendall(line[at : at + 50_000])
        found += link.receive()
    assert found == [{"a": text}]


def test_a_cause_names_kind_code_and_time() -> None:
    made = cause("node_lost", "node_silent", 2, data={"seconds": 10})
    assert (made["kind"], made["code"], made["node"], made["data"]) == ("node_lost", "node_silent", 2, {"seconds": 10})
    assert abs(made["at"] - time.time()) < 60


def test_a_closed_connection(ends: tuple[socket.socket, Link]) -> None:
    theirs, link = ends
    theirs.close()
    with pytest.raises(ConnectionLost):
        link.receive()
    with pytest.raises(ConnectionLost):
        link.send({})
