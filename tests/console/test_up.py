"""`manage.py up` and what it starts (`live`, `hold_services` among it), as processes."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from console.services import Embedded
from tests.console.processes import free_port, wait_for

pytestmark = pytest.mark.flow
ROOT = Path(__file__).resolve().parents[2]


COMMANDS = [["manage.py", name] for name in ("live", "hold_services", "watch_runs", "payments_sandbox")]


class Installation:
    """A console with its data in a folder of its own."""

    def __init__(self, var):
        self.var, self.port = var, free_port()
        self.embedded = Embedded(var)
        self.url = f"http://127.0.0.1:{self.port}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINYARD_", "DJANGO_"))}
        self.environment = clean | {
            "TRAINYARD_VAR": str(var),
            "TRAINYARD_URL": self.url,
            "SANDBOX_PORT": str(free_port()),
        }

    def up(self, **environment):
        return subprocess.Popen(
            [sys.executable, "manage.py", "up"],
            cwd=ROOT, env=self.environment | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def is_ready(self):
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def programs(self, *words):
        mark = f"trainyard={self.var}"
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if mark in (line := process.info["cmdline"] or []) and set(words) <= set(line)
        ]

    def all(self):
        return self.programs() + self.embedded.processes()

    def end(self):
        for process in self.all():
            process.kill()
        shutil.rmtree(self.embedded.socket_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    made = Installation(tmp_path_factory.mktemp("console") / "var")
    yield made
    made.end()


@pytest.fixture
def running(installation):
    process = installation.up()
    wait_for(lambda: process.poll() is not None or installation.is_ready(), 90)
    assert process.poll() is None, process.communicate()[0]
    yield process
    process.kill()
    process.communicate()


def finish(process):
    output, _ = process.communicate(timeout=90)
    return process.returncode, " ".join(output.split())


def test_serves_refuses_a_second_and_stops_cleanly(installation, running):
    code, output = finish(installation.up())
    assert code == 0
    assert f"process {running.pid}" in output
    assert installation.url in output

    other = Installation(installation.var.parent / "other")
    code, output = finish(other.up(TRAINYARD_URL=installation.url))
    other.embedded.stop()
    other.end()
    assert code != 0
    assert f"Port {installation.port}" in output
    assert "TRAINYARD_URL" in output

    running.send_signal(signal.SIGINT)
    code, output = finish(running)
    assert code == 0, output
    assert installation.url in output
    assert "Stopped." in output
    assert installation.all() == []


def test_whatever_is_killed_comes_back(installation, running):
    for words in (["gunicorn"], ["celery", "worker"], ["celery", "beat"], *COMMANDS):
        parents = [process for process in installation.programs(*words) if _is_supervised(process)]
        assert len(parents) == 1, words
        victims = [*parents[0].children(recursive=True), *parents]
        parents[0].kill()
        wait_for(lambda words=words, old=victims: _others(installation.programs(*words), old))
        psutil.wait_procs(victims, timeout=15)
        assert not [process for process in victims if process.is_running()], words
    for server in installation.embedded.processes():
        server.kill()
    wait_for(lambda: len(installation.embedded.processes()) == 2 and installation.is_ready(), 60)


def test_a_killed_up_takes_its_programs_along(installation, running):
    running.kill()
    wait_for(lambda: not installation.programs(), 60)


def test_after_everything_was_killed_at_once(installation, running):
    left = installation.all()
    for process in [psutil.Process(running.pid), *left]:
        process.kill()
    running.wait()
    again = installation.up()
    try:
        wait_for(lambda: again.poll() is not None or installation.is_ready(), 90)
        assert again.poll() is None, again.communicate()[0]
        assert len(installation.programs("supervisor.supervisord")) == 1
    finally:
        again.terminate()
        code, output = finish(again)
    assert code == 0, output
    assert installation.all() == []


def _is_supervised(process):
    parent = process.parent()
    return parent is not None and "supervisor.supervisord" in parent.cmdline()


def _others(processes, old):
    return [process for process in processes if process not in old and _is_supervised(process)]
