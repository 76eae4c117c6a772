"""`manage.py up`: why it does not start, and how long it waits for a console that does not answer."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from django.core.management import CommandError

from console.management.commands import up
from console.supervision import embedded, supervisor

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


def test_a_used_port_is_noticed_on_ipv4_and_ipv6(settings):
    settings.PAYMENTS_SANDBOX = False
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.create_server((host, 0), family=family) as used:
            port = used.getsockname()[1]
            settings.WEB_BIND = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
            with pytest.raises(supervisor.UpError, match=rf"{port} of {host} can't be used \(Address already in use"):
                supervisor.require_free_ports()
        supervisor.require_free_ports()
    settings.PAYMENTS_SANDBOX, settings.SANDBOX_PORT = True, port
    with pytest.raises(supervisor.UpError, match=f"SANDBOX_PORT is {port}, the port of the console itself"):
        supervisor.require_free_ports()


def test_a_process_of_another_user_that_is_left_over_is_named():
    def deny(_number):
        raise psutil.AccessDenied

    with pytest.raises(supervisor.UpError, match="Process 7 is left over from an earlier start by another user"):
        supervisor._end_processes([SimpleNamespace(pid=7, send_signal=deny)])


def test_a_redis_that_cannot_start_says_why(tmp_path):
    servers = embedded.Embedded(tmp_path)
    (servers.log_dir / "redis.log").mkdir(parents=True)
    with pytest.raises(embedded.ServiceError, match=r"(?s)^Redis did not start: .*Is a directory"):
        servers.start(database=False)


def test_paths_of_sockets_are_measured_in_bytes():
    assert len(os.fsencode(embedded.Embedded(Path("/", "é" * 50)).socket_dir)) < 80


def test_a_running_console_that_never_answers_is_given_up_after_its_time(clock):
    command = up.Command()
    command.stopping = NEVER_SET
    with pytest.raises(CommandError, match="But it is not ready"):
        command._report_running(supervisor.AlreadyRunning(pid=7))
    assert clock.seconds == up.STARTING_SECONDS
