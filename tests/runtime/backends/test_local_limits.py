"""Memory and processes: who takes more than was bought is told so, by whatever means the machine has to see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from runtime.specs import FailureCode, Outcome, Resources

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard


def test_out_of_memory_by_files_alone_is_no_lost_node(yard: Yard) -> None:
    # Files in memory outlive whom the kernel kills for them, so in the end it kills the launcher too.
    script = """
    with open("/dev/shm/file", "wb") as file:
        for _ in range(400): file.write(bytes(1 << 20))
    """
    status = yard.run(script, resources=Resources(cpus=1, memory_mib=200))
    assert status.outcome in {Outcome.OUT_OF_MEMORY, Outcome.CODE_FAILED}
    assert status.failure is not None
    assert status.failure.code in {FailureCode.OUT_OF_MEMORY, FailureCode.RANK_EXITED}, "the tmpfs was full at first"


def test_the_watchdog_measures_where_there_are_no_control_groups(yard: Yard) -> None:
    script = """
    import os, signal
    if os.environ["RANK"] == "1":
        kept = bytearray(300 << 20)
        for at in range(0, len(kept), 4096): kept[at] = 1
    while True: signal.pause()
    """
    yard.backend = yard.another(cgroups=False)
    status = yard.run(script, workers_per_node=2, resources=Resources(cpus=1, memory_mib=200))
    assert status.outcome is Outcome.OUT_OF_MEMORY
    assert status.failure is not None
    assert status.failure.rank == 1
    assert status.failure.data["used_mib"] >= 200


def test_a_helper_that_is_killed_for_memory_is_the_cause(yard: Yard) -> None:
    script = """
    import os, sys
    if not os.fork():
        kept = bytearray(300 << 20)
        for at in range(0, len(kept), 4096): kept[at] = 1
    _pid, status = os.wait()
    sys.exit("a worker was killed" if status else 0)
    """
    status = yard.run(script, resources=Resources(cpus=1, memory_mib=200))
    assert status.outcome is Outcome.OUT_OF_MEMORY
    assert status.failure is not None
    assert (status.failure.rank, status.failure.exit_code) == (0, 1)


def test_too_much_memory(yard: Yard) -> None:
    script = """
    import os, signal
    if os.environ["RANK"] == "1":
        kept = bytearray(300 << 20)
        for at in range(0, len(kept), 4096): kept[at] = 1
    while True: signal.pause()
    """
    status = yard.run(script, workers_per_node=2, resources=Resources(cpus=1, memory_mib=200))
    assert status.outcome is Outcome.OUT_OF_MEMORY
    assert status.failure is not None
    assert status.failure.rank == 1
    assert status.failure.code is FailureCode.OUT_OF_MEMORY
    assert status.failure.data["limit_mib"] == 200
    assert "200 MiB" in status.failure.message


def test_files_in_memory_count_as_memory(yard: Yard) -> None:
    script = """
    import signal
    with open("/dev/shm/file", "wb") as file:
        for _ in range(150): file.write(bytes(1 << 20))
    kept = bytearray(100 << 20)
    for at in range(0, len(kept), 4096): kept[at] = 1
    while True: signal.pause()
    """
    status = yard.run(script, resources=Resources(cpus=1, memory_mib=200))
    assert status.outcome is Outcome.OUT_OF_MEMORY


def test_pages_that_processes_share_count_once(yard: Yard) -> None:
    script = """
    import os
    kept = bytearray(120 << 20)
    for at in range(0, len(kept), 4096): kept[at] = 1
    children = [os.fork() for _ in range(1)]
    if not all(children):
        import time; time.sleep(1.5)
        os._exit(0)
    os.waitpid(children[0], 0)
    """
    assert yard.run(script, resources=Resources(cpus=1, memory_mib=200)).outcome is Outcome.COMPLETED


def test_too_many_processes(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.backends.orders.TASK_LIMIT", 30)
    monkeypatch.setattr("runtime.backends.orders.TASKS_PER_RANK", 0)
    script = "import os, signal\nfor _ in range(100):\n    if os.fork() == 0: signal.pause()\nsignal.pause()\n"
    status = yard.run(script)
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure is not None
    assert "more than 30 processes" in status.failure.message
