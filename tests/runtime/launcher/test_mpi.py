"""The variables and messages of MPI runs. Runs are in tests/runtime/backends/test_mpi.py.

A stub is what mpirun starts in place of a rank or of ssh. It asks the launcher to start the rank, or a daemon of mpirun
on another node, and gets as answer how that ended.
"""

import os
from pathlib import Path
from selectors import DefaultSelector
from types import SimpleNamespace

import pytest

from runtime.launcher import mpi, worker_group
from runtime.launcher.elastic import Round, round_plan
from runtime.launcher.warm.client import WarmRanks
from tests.runtime.launcher.test_topology import PLAN


def test_open_mpi_is_given_the_runs_interface_unless_that_is_loopback():
    """Open MPI refuses loopback between hosts."""
    plan = round_plan(PLAN._replace(controller="mpi"), Round(0, [0, 1]))
    environments = [mpi.mpirun_environment(plan._replace(interface=each), "") for each in ("eth1", "lo")]
    assert [each.get("OMPI_MCA_btl_tcp_if_include") for each in environments] == ["eth1", None]


def test_mpirun_is_located_beside_the_interpreter_or_in_the_path(tmp_path):
    image, system = tmp_path / "image", tmp_path / "system"
    for folder in (image, system):
        folder.mkdir()
    python = str(image / "python")
    assert mpi.find_mpirun(python, f"/none:{system}") == str(image / "mpirun"), "the error of the start names this path"
    (system / "mpirun").touch(0o755)
    # An empty entry of the path, which a shell takes for the current folder, is skipped.
    assert mpi.find_mpirun(python, f"/none::{system}") == str(system / "mpirun")
    (image / "mpirun").touch(0o755)
    assert mpi.find_mpirun(python, f"/none:{system}") == str(image / "mpirun")


def mpi_of_node_1():
    """Return the Mpi of PLAN's node, and the list of its messages to other launchers."""
    sent = []
    launch_plan = {"plan": PLAN._asdict(), "python": "/image/bin/python", "environment": {}}
    created = mpi.Mpi(
        DefaultSelector(),
        None,
        launch_plan,
        send=sent.append,
        on_code_started=lambda: None,
        on_all_started=lambda: None,
    )
    created._plan = PLAN._replace(controller="mpi", original_nodes=[0, 1])
    return created, sent


def test_an_mpi_command_longer_than_a_message_is_refused():
    """A message that is too long would disconnect the nodes. JSON has six bytes for each of these characters."""
    created, sent = mpi_of_node_1()
    answers = []
    stub = SimpleNamespace(send=answers.append)
    created._request_daemon(stub, "job-1-1-1", "\u4f60" * 300_000)
    assert (sent, answers) == ([], [{"exit_code": 1, "signal": ""}])
    created._request_daemon(stub, "job-1-1-1", "prted --daemonize")
    assert [message["command"] for message in sent] == ["prted --daemonize"]


def test_a_refused_rank_is_the_fault_of_the_code_that_runs_already():
    """The node's first rank runs already, so its code may have used up the process limit."""
    created, _sent = mpi_of_node_1()
    created._give_up_at = float("inf")  # mpirun has any time to start the ranks
    started = []

    def start_rank(_plan, local_rank, _variables):
        if local_rank:
            raise BlockingIOError(11, "no more processes")
        started.append(local_rank)
        return SimpleNamespace(pid=7)

    created._worker_group = SimpleNamespace(start_rank=start_rank, has_ended_ranks=False)
    answers = []
    stub = SimpleNamespace(send=answers.append)
    for local_rank in (0, 1):
        rank = created._plan.rank(local_rank)
        created._start_rank(stub, {"OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank), "OMPI_COMM_WORLD_RANK": str(rank)})
    cause = created.handle_timers(now=0.0)
    assert (started, answers) == ([0], [{"exit_code": 1, "signal": ""}])
    assert (cause["kind"], cause["code"]) == ("code_failed", "too_many_processes")


def test_a_rank_that_cannot_be_started_leaves_no_descriptor_open(monkeypatch):
    """Code could otherwise use up the launcher's descriptors by requests to start ranks."""
    launch_plan = {"outputs": [1], "python": "", "environment": {}, "local_rank_flag": False, "folder": "/"}
    group = worker_group.WorkerGroup(DefaultSelector(), PLAN, launch_plan, WarmRanks(None))
    monkeypatch.setattr(worker_group, "spawn", lambda *_arguments, **_more: os.open("/none", os.O_RDONLY))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="none"):
        group.start_rank(PLAN, 0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_mpi_daemon_that_cannot_be_started_is_reported_as_ended(monkeypatch):
    created, sent = mpi_of_node_1()

    def refuse(*_arguments, **_more):
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(mpi, "spawn", refuse)
    assert created.handle_message({"type": "mpi", "id": 7, "node": 1, "command": "prted"})
    assert sent == [{"type": "mpi", "id": 7, "ended": 1}]
