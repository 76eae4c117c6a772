"""`manage.py up` beside a console that runs. Killed and stopped consoles are in `test_killed`."""

from pathlib import Path

import pytest

from tests.flows import WHOLE_CONSOLE
from tests.flows.console import Console

pytestmark = [*WHOLE_CONSOLE, pytest.mark.slow]


def test_up_refuses_a_second_console_and_a_port_in_use(console, short_folders):
    second = console.manage("up")
    assert second.returncode == 0  # no failure: it says where the console runs
    output = " ".join(second.stdout.split())
    assert f"process {console.process.pid}" in output
    assert console.url in output

    other = Console(short_folders(), Path("/no/images"), TRAINYARD_URL=console.url)  # the port of the first console
    refused = other.manage("up")
    other.embedded.stop()  # in case `up` left its servers
    other.remove()
    assert refused.returncode != 0
    output = " ".join((refused.stdout + refused.stderr).split())
    assert f"Port {console.port}" in output
    assert "TRAINYARD_URL" in output
