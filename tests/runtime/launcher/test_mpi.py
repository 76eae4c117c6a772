"""What mpirun is told. How it then runs: tests/runtime/backends/test_mpi.py."""

from __future__ import annotations

import ast
from pathlib import Path
from selectors import DefaultSelector

import pytest

from runtime.launcher import mpi
from runtime.launcher.elastic import Round, plan_of
from runtime.launcher.report import Message
from tests.runtime.launcher.test_topology import PLAN

STUB = ["/image/bin/python", "-I", "-S", "/launcher/mpi_stub.py", "/tmp/socket", "slot"]


def test_mpirun_is_the_images_and_fills_the_nodes_in_order() -> None:
    plan = plan_of(PLAN._replace(controller="mpi"), Round(0, [0, 1]))
    command = mpi.mpirun(plan, "/image/bin/mpirun", STUB)
    assert command[0] == "/image/bin/mpirun"
    assert command[command.index("--host") + 1] == "job-1-1-0:2,job-1-1-1:2"
    assert command[command.index("-np") + 1] == "4"
    assert command[-len(STUB) :] == STUB
    assert "--allow-run-as-root" in command


def test_mpirun_is_found_beside_the_interpreter_or_in_the_path(tmp_path: Path) -> None:
    image, system = tmp_path / "image", tmp_path / "system"
    for folder in (image, system):
        folder.mkdir()
    python = str(image / "python")
    assert mpi.find_mpirun(python, f"/none:{system}") == str(image / "mpirun"), "what is missed is named"
    (system / "mpirun").touch(0o755)
    assert mpi.find_mpirun(python, f"/none::{system}") == str(system / "mpirun")
    (image / "mpirun").touch(0o755)
    assert mpi.find_mpirun(python, f"/none:{system}") == str(image / "mpirun")


def test_a_later_round_names_the_nodes_that_are_left() -> None:
    plan = PLAN._replace(controller="mpi", node=2, nodes=3, min_nodes=2, addresses=["a", "b", "c"])
    command = mpi.mpirun(plan_of(plan, Round(1, [0, 2])), "/image/bin/mpirun", STUB)
    assert command[command.index("--host") + 1] == "job-1-1-0:2,job-1-1-2:2"


def test_both_generations_of_open_mpi_are_told_what_stands_for_ssh() -> None:
    told = mpi.parameters(PLAN, "python stub remote")
    assert told["OMPI_MCA_plm_rsh_agent"] == told["PRTE_MCA_plm_ssh_agent"] == "python stub remote"


def test_messages_go_over_the_interface_that_the_plan_names() -> None:
    assert mpi.parameters(PLAN._replace(interface="eth1"), "")["OMPI_MCA_btl_tcp_if_include"] == "eth1"
    assert "OMPI_MCA_btl_tcp_if_include" not in mpi.parameters(PLAN._replace(interface="lo"), "")


def test_the_stub_imports_as_little_as_it_can() -> None:
    tree = ast.parse((Path(mpi.__file__).parent / "mpi_stub.py").read_text())
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"json", "os", "signal", "socket", "sys"}


class Told:
    """In place of the other launchers and of a stub: what they were told."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


def agent_of_mpi(tmp_path: Path) -> tuple[mpi.Mpi, Told]:
    told = Told()
    order = {"plan": PLAN._asdict(), "python": "/image/bin/python", "environment": {}}
    made = mpi.Mpi(DefaultSelector(), None, order, tell=told.send, ready=lambda: None)  # type: ignore[arg-type]
    made._plan = PLAN._replace(controller="mpi", homes=[0, 1])
    return made, told


def test_a_command_that_the_code_made_up_stays_shorter_than_the_launchers_lines(tmp_path: Path) -> None:
    """In JSON it may be twice as long again: a line too long would cut the nodes off from each other."""
    made, told = agent_of_mpi(tmp_path)
    stub = Told()
    made._send_daemon(stub, "job-1-1-1", "\u4f60" * 300_000)  # type: ignore[arg-type]
    assert told.messages == []
    assert stub.messages == [{"exit_code": 1, "signal": ""}]
    made._send_daemon(stub, "job-1-1-1", "prted --daemonize")  # type: ignore[arg-type]
    assert [message["command"] for message in told.messages] == ["prted --daemonize"]


def test_where_no_process_is_left_a_daemon_ends_and_the_launcher_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, told = agent_of_mpi(tmp_path)

    def refuse(*_arguments: object, **_more: object) -> int:
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(mpi, "spawn", refuse)
    made._node = 1
    assert made.heard({"type": "mpi", "id": 7, "node": 1, "command": "prted"})
    assert told.messages == [{"type": "mpi", "id": 7, "ended": 1}]
