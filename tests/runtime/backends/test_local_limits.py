"""Limits of memory and processes, with control groups and without them."""

import pytest

from runtime.specs import FailureCode, Outcome, Resources

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")


SMALL = Resources(cpus=1, memory_mib=200)


def test_too_much_memory_by_files_alone_is_no_lost_node(harness):
    # Files in memory outlive the processes that the kernel kills for them. In the end it kills the launcher too.
    script = """
    with open("/dev/shm/file", "wb") as file:
        for _ in range(400): file.write(bytes(1 << 20))
    """
    status = harness.run(script, resources=SMALL)
    assert status.outcome in {Outcome.OUT_OF_MEMORY, Outcome.CODE_FAILED}
    # RANK_EXITED: the tmpfs was full before the kernel killed a process.
    assert status.failure.code in {FailureCode.OUT_OF_MEMORY, FailureCode.RANK_EXITED}


@pytest.mark.parametrize("cgroups", [True, False], ids=["with control groups", "measured by the supervisor"])
def test_too_much_memory(harness, cgroups):
    script = """
    import ctypes, os, signal
    if os.environ["RANK"] == "1":
        ctypes.CDLL(None).prctl(15, b"\\xff)\\rNSpid:\\tx", 0, 0, 0)  # PR_SET_NAME: a name that is no UTF-8
        kept = bytearray(300 << 20)
        for at in range(0, len(kept), 4096): kept[at] = 1
    while True: signal.pause()
    """
    harness.backend = harness.new_backend(cgroups=cgroups)
    failure = harness.run_to_failure(Outcome.OUT_OF_MEMORY, script, workers_per_node=2, resources=SMALL)
    assert (failure.rank, failure.code, failure.data["limit_mib"]) == (1, FailureCode.OUT_OF_MEMORY, 200)
    assert "200 MiB" in failure.message
    assert cgroups or failure.data["used_mib"] >= 200


def test_a_helper_that_is_killed_for_memory_is_the_cause(harness):
    script = """
    import os, sys
    if not os.fork():
        kept = bytearray(300 << 20)
        for at in range(0, len(kept), 4096): kept[at] = 1
    _pid, status = os.wait()
    sys.exit("a worker was killed" if status else 0)
    """
    failure = harness.run_to_failure(Outcome.OUT_OF_MEMORY, script, resources=SMALL)
    assert (failure.rank, failure.exit_code) == (0, 1)


def test_pages_that_processes_share_count_once(harness):
    script = """
    import os, time
    kept = bytearray(120 << 20)  # twice as much would exceed the limit
    for at in range(0, len(kept), 4096): kept[at] = 1
    child = os.fork()
    if not child:
        time.sleep(1.5)
        os._exit(0)
    os.waitpid(child, 0)
    """
    harness.complete(script, resources=SMALL)


def test_too_many_processes(harness, monkeypatch):
    monkeypatch.setattr("runtime.backends.supervision.submission.TASKS_PER_NODE", 30)
    monkeypatch.setattr("runtime.backends.supervision.submission.TASKS_PER_RANK", 0)
    script = "import os, signal\nfor _ in range(100):\n    if os.fork() == 0: signal.pause()\nsignal.pause()\n"
    assert "more than 30 processes" in harness.run_to_failure(Outcome.CODE_FAILED, script).message
