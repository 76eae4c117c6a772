"""What mpirun is told. How it then runs: tests/runtime/backends/test_mpi.py."""

from __future__ import annotations

import ast
from pathlib import Path

from runtime.launcher import mpi
from runtime.launcher.elastic import Round, plan_of
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
