"""`manage.py up`: how long it waits for a console that does not answer."""

from types import SimpleNamespace

import pytest
from django.core.management import CommandError

from console.management.commands import up
from console.supervision import supervisor

NEVER_SET = SimpleNamespace(wait=lambda _seconds: False)
"""An event that nobody sets. `wait` returns at once."""


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when /readyz is polled. Each poll waits five seconds for an answer, and gets none."""
    clock = SimpleNamespace(seconds=0.0)

    def poll():
        clock.seconds += 5
        return False

    monkeypatch.setattr(supervisor, "is_ready", poll)
    for module in (supervisor, up):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    return clock


def test_a_started_console_that_never_answers_is_given_up_after_its_time(clock, monkeypatch):
    supervisord = supervisor.Supervisord()
    monkeypatch.setattr(supervisord, "is_running", lambda: True)
    with pytest.raises(supervisor.UpError, match="did not get ready"):
        supervisord.wait_until_ready(NEVER_SET)
    assert clock.seconds == supervisor.READY_SECONDS


def test_a_running_console_that_never_answers_is_given_up_after_its_time(clock):
    command = up.Command()
    command.stopping = NEVER_SET
    with pytest.raises(CommandError, match="But it is not ready"):
        command._report_running(supervisor.AlreadyRunning(pid=7))
    assert clock.seconds == up.STARTING_SECONDS
