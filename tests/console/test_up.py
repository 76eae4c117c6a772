"""`manage.py up` and what it starts (`live`, `hold_services` among it), as processes.

What becomes of runs and their bills when any of it is killed is in `tests/flows/test_killed.py`.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.console.processes import wait_for
from tests.flows.console import Console

pytestmark = pytest.mark.flow
COMMANDS = [["manage.py", name] for name in ("live", "hold_services", "watch_runs", "payments_sandbox")]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    made = Console(tmp_path_factory.mktemp("console") / "var", Path("/no/images"))
    yield made
    made.remove()


@pytest.fixture
def console(installation: Console) -> Console:
    """The console up: still, or again. Each test leaves it whole or down."""
    if installation.process is None or installation.process.poll() is not None:
        installation.up()
    return installation


def test_whatever_is_killed_comes_back(console: Console) -> None:
    for words in (["gunicorn"], ["celery", "worker"], ["celery", "beat"], *COMMANDS):
        parents = [process for process in console.programs(*words) if _is_supervised(process)]
        assert len(parents) == 1, words
        victims = [*parents[0].children(recursive=True), *parents]
        parents[0].kill()
        wait_for(lambda words=words, old=victims: _others(console.programs(*words), old))
        psutil.wait_procs(victims, timeout=15)
        assert not [process for process in victims if process.is_running()], words
    for server in console.embedded.processes():
        server.kill()
    wait_for(lambda: len(console.embedded.processes()) == 2 and console.is_ready(), 60)


def test_serves_refuses_a_second_and_stops_cleanly(console: Console) -> None:
    assert console.process is not None
    again = console.up_again()
    output = _words(again.stdout)
    assert again.returncode == 0
    assert f"process {console.process.pid}" in output
    assert console.url in output

    other = Console(Path(tempfile.mkdtemp(prefix="ty-")), Path("/no/images"), TRAINYARD_URL=console.url)
    refused = other.up_again()
    output = _words(refused.stdout)
    other.embedded.stop()
    other.remove()
    assert refused.returncode != 0
    assert f"Port {console.port}" in output
    assert "TRAINYARD_URL" in output

    console.process.send_signal(signal.SIGINT)
    code = console.process.wait(90)
    output = _words(console.output.read_text())
    assert code == 0, output
    assert console.url in output
    assert "Stopped." in output
    assert console.processes() == []


def test_a_killed_up_takes_its_programs_along(console: Console) -> None:
    assert console.process is not None
    console.process.kill()
    console.process.wait()
    wait_for(lambda: not console.programs(), 60)


def _words(output: str) -> str:
    return " ".join(output.split())


def _is_supervised(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and "supervisor.supervisord" in parent.cmdline()


def _others(processes: list[psutil.Process], old: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process not in old and _is_supervised(process)]
