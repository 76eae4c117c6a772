"""Runs that mpirun starts: on several nodes without ssh, with all variables, and with the first failure as cause."""

import json
import re

import pytest

from runtime.errors import InvalidSpec
from runtime.specs import Controller, FailureCode, Framework, Outcome, Resources
from tests.runtime.images_of_ours import use_image

pytestmark = [
    pytest.mark.torch,
    pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds"),
    pytest.mark.cores(2),
    pytest.mark.slow,
]

REDUCES = """
    import ctypes, json, os, sys
    mpi = ctypes.CDLL(os.path.join(sys.prefix, "lib", "libmpi.so.40"), ctypes.RTLD_GLOBAL)
    assert mpi.MPI_Init(None, None) == 0
    world = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")))
    number = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_int")))
    add = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_op_sum")))
    rank, size, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    mpi.MPI_Comm_rank(world, ctypes.byref(rank))
    mpi.MPI_Comm_size(world, ctypes.byref(size))
    mine = ctypes.c_int(rank.value + 1)
    assert mpi.MPI_Allreduce(ctypes.byref(mine), ctypes.byref(total), 1, number, add, world) == 0
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "BACKEND", "EPOCHS", "WORKSPACE", "OMPI_COMM_WORLD_RANK")
    print("variables", json.dumps({name: os.environ[name] for name in names}), flush=True)
    print("found", rank.value, size.value, total.value, flush=True)
    THEN
    mpi.MPI_Finalize()
    print("finalized", flush=True)
"""
"""Every rank adds up the numbers of all ranks, counted from 1, by calls of MPI. Tests replace THEN."""
MPI = {
    "framework": Framework.HOROVOD,
    "controller": Controller.MPI,
    "resources": Resources(cpus=0.5, memory_mib=2048),
}


@pytest.fixture
def mpi(harness):
    """Return a function that runs a script under MPI in the horovod image, requires this outcome and returns the
    status."""
    use_image(harness, "horovod")

    def run(outcome, source, **changes):
        harness.submit(source, deadline_seconds=120, **MPI, **changes)
        return harness.wait_for_outcome(outcome)

    return run


def test_ranks_meet_through_mpi_and_a_node_may_finish_long_before_another(mpi, harness, left_running):
    # After MPI_Finalize all ranks but 0 exit, so node 1 has ended while rank 0 still works. mpirun must not take node 1
    # for lost, and end rank 0.
    works_on = """
    import pathlib, time
    mark = pathlib.Path(os.environ["RUN_DIR"]) / "done"
    if rank.value:
        mark.touch()
        sys.exit()
    while not mark.exists(): time.sleep(0.01)
    time.sleep(3)  # longer than mpirun takes to end what is left when a daemon is lost
    print("saved", flush=True)
    """
    script = REDUCES.replace("THEN", "pass") + works_on
    mpi(Outcome.COMPLETED, script, nodes=2, workers_per_node=2, epochs=7)
    for rank in range(4):
        log = harness.log(rank)
        assert f"found {rank} 4 10" in log
        assert log.endswith("finalized\n" if rank else "saved\n")
        (variables,) = re.findall(r"^variables (.*)$", log, re.MULTILINE)
        assert json.loads(variables) == {
            "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "NODE_RANK": str(rank // 2),
            "BACKEND": "mpi", "EPOCHS": "7", "WORKSPACE": "/workspace", "OMPI_COMM_WORLD_RANK": str(rank),
        }  # fmt: skip
    assert left_running() == []


@pytest.mark.parametrize(
    ("end", "exit_code", "signal_name"),
    [("os.kill(os.getpid(), 9)", None, "SIGKILL"), ("mpi.MPI_Abort(world, 5)", 5, "")],
)
def test_the_rank_that_ended_first_is_the_cause(mpi, end, exit_code, signal_name, left_running):
    script = REDUCES.replace("THEN", f"import signal; {end} if rank.value == 2 else signal.pause()")
    status = mpi(Outcome.CODE_FAILED, script, nodes=2, workers_per_node=2)
    assert (status.failure.node, status.failure.rank) == (1, 2)
    assert (status.failure.exit_code, status.failure.signal) == (exit_code, signal_name)
    assert status.finished_at is not None
    assert left_running() == []


def test_mpi_goes_on_without_a_node(harness):
    use_image(harness, "horovod")
    script = REDUCES.replace("THEN", "import signal\n    if size.value == 3: signal.pause()")
    harness.start(script, text="found", nodes=3, min_nodes=2, **MPI)
    harness.lose_node(1)
    status = harness.wait_for_outcome(Outcome.COMPLETED)
    assert [span.nodes for span in status.spans] == [3, 2]
    assert "found 0 2 3" in harness.log(0)
    assert "found 1 2 3" in harness.log(2)


@pytest.fixture
def bare_mpirun(harness):
    """Return a function that gives the bare image an mpirun with this text, until the end of the test."""
    program = harness.images_root / "bare" / "bin" / "mpirun"

    def write(text):
        program.write_text(text)
        program.chmod(0o755)

    yield write
    program.unlink()


def test_an_mpirun_that_fails_is_the_platforms_fault(harness, bare_mpirun):
    bare_mpirun("#!/bin/sh\necho no room >&2\nexit 9\n")
    failure = harness.run_to_failure(Outcome.PLATFORM_ERROR, "print('never')", controller=Controller.MPI)
    assert failure.code is FailureCode.NODE_NOT_STARTED
    assert "mpirun ended (code 9) before it had started the ranks" in failure.message
    assert "no room" in harness.all_logs("job-1-1")


def test_an_mpirun_that_the_first_rank_ends_is_the_codes_fault_and_paid(harness, bare_mpirun):
    # It starts rank 0 only, as if the rank had stopped it then. Its last seven arguments are the number of ranks, and
    # the command line of the stubs.
    bare_mpirun(
        '#!/bin/sh\nwhile [ "$1" != -np ]; do shift; done\nshift 2\n'
        'OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 "$@" &\nwait\n'
    )
    script = """
    import os, pathlib, signal, time
    print("ready", flush=True)
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        if b"/mpirun" in path.read_bytes(): os.kill(int(path.parent.name), signal.SIGKILL)
    time.sleep(60)
    """
    harness.submit(script, controller=Controller.MPI, nodes=2, workers_per_node=2)
    status = harness.wait_for_outcome(Outcome.CODE_FAILED)
    assert status.failure.code is FailureCode.RANKS_NOT_STARTED
    assert "ready" in harness.log(0)
    assert None not in [node.started_at for node in status.nodes], "paid from the start of the first rank of any node"


def test_an_image_without_mpirun_is_refused(harness):
    with pytest.raises(InvalidSpec, match="has no mpirun") as refused:
        harness.backend.check_image(harness.spec().image, Controller.MPI)
    assert refused.value.field == "controller"


def test_forged_messages_to_the_launchers_socket_start_no_rank_twice(mpi, harness):
    # The launcher listens at the path below for mpirun's stubs. `environment` asks it to start a rank, `host` and
    # `command` to start a daemon on another node. 200 open connections are more than it accepts.
    script = REDUCES.replace(
        "THEN",
        """
    import glob, socket
    (path,) = glob.glob("/tmp/.trainyard-mpi/*")
    held = []
    for number in range(200):
        link = socket.socket(socket.AF_UNIX)
        link.setblocking(False)
        try:
            link.connect(path)
            for lie in ({"environment": {"OMPI_COMM_WORLD_LOCAL_RANK": [], "OMPI_COMM_WORLD_RANK": {}}},
                        {"environment": {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}},
                        {"environment": 1}, {"host": 1}, {"host": "elsewhere", "command": 2}, {}):
                link.send(json.dumps(lie).encode() + b"\\n")
        except OSError:
            pass
        held.append(link)
    print("sent lies", flush=True)""",
    )
    mpi(Outcome.COMPLETED, script, nodes=2)
    assert "sent lies" in harness.log()
    assert harness.log().count("found 0") == 1, "no rank started twice"
