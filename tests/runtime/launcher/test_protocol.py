"""Messages between launchers, and the first cause of a failure."""

import socket

import pytest

from runtime.launcher.causes import first_cause
from runtime.launcher.protocol import MAX_LINE_BYTES, ConnectionLost, Link


def failed(at, rank, signal="", **more):
    return {"kind": "code_failed", "at": at, "rank": rank, "signal": signal, **more}


@pytest.mark.parametrize(
    ("causes", "first"),  # `first`: an index into the causes by time
    [
        ([], None),
        ([failed(5, 1), failed(4, 0)], 0),
        # Of failures within a second, a killed rank comes first. SIGABRT and SIGTERM are effects of other failures.
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
        # An echo is the first cause only where there are none but echoes, whatever the clocks say.
        ([failed(5.0, 0, echo=True), failed(9.0, 1)], 1),
        ([failed(5.0, 0, echo=True), failed(9.0, 1, "SIGABRT")], 1),
        ([failed(5.0, 0, echo=True), failed(5.3, 1), failed(5.4, 2, "SIGKILL")], 2),
        ([failed(5.0, 0, echo=True), {"kind": "node_lost", "at": 7.2}], 1),
        ([failed(5.0, 0, echo=True), failed(5.1, 1, echo=True)], 0),
        # A node's report about another node counts only if the other's own report is missing.
        ([failed(5.0, 1, node=1, heard=True), failed(5.0, 1, node=1)], 1),
        ([failed(5.0, 1, node=1, heard=True), failed(5.1, 1, node=1, echo=True), failed(5.2, 0, node=0)], 2),
        ([failed(4.9, 0, node=0, echo=True), failed(5.0, 1, node=1, heard=True)], 1),
    ],
)
def test_the_first_cause_is_found_despite_echoes_and_inexact_times(causes, first):
    assert first_cause(causes) is (None if first is None else sorted(causes, key=lambda cause: cause["at"])[first])


@pytest.fixture
def ends():
    """The other end of a connection, and a Link at ours."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield theirs, Link(ours)


def test_complete_lines_with_an_object_are_received(ends):
    theirs, link = ends
    assert link.receive() == []
    theirs.sendall(b'{"a": 1}\n{"b"')
    assert link.receive() == [{"a": 1}]
    theirs.sendall(b': 2}\n\xff\n[1]\n\n"x"\n{}\n')
    assert link.receive() == [{"b": 2}, {}]


def test_a_line_without_an_end_breaks_the_connection(ends):
    theirs, link = ends
    for _piece in range(MAX_LINE_BYTES // 50_000):
        theirs.sendall(b"x" * 50_000)
        assert link.receive() == []
    theirs.sendall(b"x" * 50_000)
    with pytest.raises(ConnectionLost, match="without an end"):
        link.receive()
