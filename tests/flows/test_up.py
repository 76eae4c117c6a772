"""`manage.py up` started a second time, on a port in use, and stopped. Killed programs are in `test_killed`."""

import signal
from pathlib import Path

import pytest

from tests.flows import WHOLE_CONSOLE
from tests.flows.console import Console

pytestmark = [*WHOLE_CONSOLE, pytest.mark.slow]


@pytest.fixture
def stopped(console):
    """The shared console, for a test that stops it."""
    yield console
    console.up()


def words(output):
    return " ".join(output.split())


def test_up_refuses_a_second_console_and_stops_cleanly(stopped, short_folders):
    second = stopped.manage("up")
    assert second.returncode == 0
    assert f"process {stopped.process.pid}" in words(second.stdout)
    assert stopped.url in words(second.stdout)

    other = Console(short_folders(), Path("/no/images"), TRAINYARD_URL=stopped.url)
    refused = other.manage("up")
    other.embedded.stop()
    other.remove()
    assert refused.returncode != 0
    assert f"Port {stopped.port}" in words(refused.stdout + refused.stderr)
    assert "TRAINYARD_URL" in words(refused.stdout + refused.stderr)

    stopped.process.send_signal(signal.SIGINT)
    code = stopped.process.wait(90)
    output = words(stopped.output.read_text())
    assert code == 0, output
    assert stopped.url in output
    assert "Stopped." in output
    assert stopped.processes() == []
