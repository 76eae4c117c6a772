"""The first cause of a failed run: the rank that failed by itself is named, not one that lost its peer.

A failed test is never tried again here: a wrong cause is a fault, even if the next run has the right one.
"""

import textwrap

import pytest

from runtime.specs import FailureCode, Outcome

AWAIT_ALL = """
    import os, pathlib, signal, sys, time
    rank = int(os.environ["RANK"])
    run = pathlib.Path(os.environ["RUN_DIR"])
    (run / str(rank)).touch()
    while len(list(run.glob("[0-9]"))) < int(os.environ["WORLD_SIZE"]): time.sleep(0.001)
    print("last words of", rank, flush=True)
"""
"""Goes on once every rank has started."""
SERVE = """
    import socket
    port = int(os.environ["MASTER_PORT"])
    if rank == LAST:
        with socket.create_server(("127.0.0.1", port)) as server:
            peers = [server.accept()[0] for _ in range(LAST)]
            print("connected", flush=True)
            HOW
    while True:
        try: peer = socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError: time.sleep(0.01)
        else: break
    peer.recv(1)
    raise RuntimeError("connection closed by peer")
"""
"""The rank LAST fails as HOW says; tests replace both words. The others fail at the same moment, as with gloo when
a connection closes."""


@pytest.mark.parametrize("how", ["sys.exit(10 + rank)", "os.kill(os.getpid(), SIGNALS[rank % 2])"])
def test_of_simultaneous_failures_the_first_is_reported_with_its_own_code(harness, how):
    signals = "    SIGNALS = (signal.SIGKILL, signal.SIGSEGV)\n"
    failure = harness.run_to_failure(
        Outcome.CODE_FAILED, AWAIT_ALL + signals + "    " + how, nodes=2, workers_per_node=2
    )
    assert failure.node == failure.rank // 2
    expected = (10 + failure.rank, "") if "exit" in how else (None, ("SIGKILL", "SIGSEGV")[failure.rank % 2])
    assert (failure.exit_code, failure.signal) == expected
    assert failure.last_lines[-1] == f"last words of {failure.rank}"


@pytest.mark.slow
def test_a_rank_that_a_signal_ended_outranks_its_echoes(harness):
    # Reading at address 0 ends the rank with SIGSEGV.
    script = AWAIT_ALL + SERVE.replace("HOW", "__import__('ctypes').string_at(0)").replace("LAST", "3")
    failure = harness.run_to_failure(Outcome.CODE_FAILED, script, nodes=2, workers_per_node=2)
    assert (failure.rank, failure.node, failure.signal) == (3, 1, "SIGSEGV")
    assert failure.last_lines[:2] == ("last words of 3", "connected")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "import atexit; atexit.register(leave); raise ValueError('a wrong shape')",
        """
            try: raise ValueError('a wrong shape')
            finally: close(); time.sleep(0.5)
        """,
    ],
    ids=["its process ends late", "its connections close before its error is known"],
)
def test_an_exception_outranks_its_echoes(harness, how):
    script = """
    def close():
        for peer in peers: peer.close()
    def leave():
        close()
        time.sleep(1)
    """
    script = textwrap.dedent(AWAIT_ALL) + textwrap.dedent(script)
    # `how` may have several lines, and each needs the indentation of HOW.
    script += textwrap.dedent(SERVE).replace("        HOW", textwrap.indent(textwrap.dedent(how), " " * 8).strip("\n"))
    failure = harness.run_to_failure(Outcome.CODE_FAILED, script.replace("LAST", "3"), nodes=4)
    assert (failure.rank, failure.code, failure.exit_code) == (3, FailureCode.RANK_RAISED, 1)
    assert (failure.data["exception"], failure.data["message"]) == ("ValueError", "a wrong shape")
    assert failure.data["file"] == "train.py"
    assert failure.last_lines[-1] == "ValueError: a wrong shape"
    assert all(record["causes"] for record in harness.records()), "each node's record has a cause"


@pytest.mark.slow
def test_an_echo_without_an_explanation_is_reported_itself(harness):
    script = AWAIT_ALL + "    if rank: raise ConnectionResetError('by a download')\n    while True: signal.pause()"
    failure = harness.run_to_failure(Outcome.CODE_FAILED, script, nodes=2)
    assert (failure.rank, failure.data["exception"]) == (1, "ConnectionResetError")
