"""The owner of the tools, with real sandboxes: what a tool sees, how many there are, and how they end."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from runtime.tools import control, owner
from runtime.tools.control import LogFolder, SessionRequest, ToolsUnavailable, TooManySessions
from tests.console.processes import wait_for
from tests.tools import LIMITS, owner_of_tools

PROBE = """
import json, os, socket, sys
from http.server import BaseHTTPRequestHandler
from socketserver import UnixStreamServer

def attempt(action):
    try:
        return action()
    except Exception as error:
        return type(error).__name__

class Handler(BaseHTTPRequestHandler):
    def address_string(self): return ""
    def do_GET(self):
        asked = self.path.split("?", 1)[1]
        if asked == "die": os._exit(3)
        seen = {
            "view": sorted(os.listdir(sys.argv[2])),
            "event": attempt(lambda: open(sys.argv[2] + "/job-1/events").read()),
            "asked": attempt(lambda: open(asked).read()),
            "link": attempt(lambda: open(sys.argv[2] + "/job-1/link").read()),
            "write": attempt(lambda: open(sys.argv[2] + "/job-1/new", "w")),
            "network": sorted(name for _index, name in socket.if_nameindex()),
            "root": sorted(os.listdir("/")),
            "prefix": sys.argv[3],
        }
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(seen).encode())

server = UnixStreamServer("", Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[1]))
server.serve_forever()
"""
"""A tool that answers each request with what it sees from inside its sandbox."""


@pytest.fixture
def root(short_folders, monkeypatch, tmp_path):
    """The owner's folder. Its tools are the program PROBE, which tells what it sees."""
    program = tmp_path / "probe.py"
    program.write_text(PROBE)
    monkeypatch.setattr(owner, "PROGRAM", program)
    return short_folders()


@pytest.fixture
def request_of(tmp_path):
    """`request_of(organization, user)` is a request for one run's logs, with a link to a file of another tenant."""
    run = tmp_path / "runs" / "job-1-1" / "run"
    (run / "tensorboard").mkdir(parents=True)
    (run / "tensorboard" / "events").write_text("events")
    (tmp_path / "runs" / "secret").write_text("of another tenant")
    (run / "tensorboard" / "link").symlink_to(tmp_path / "runs" / "secret")
    logs = (LogFolder("job-1", str(run), "tensorboard"),)
    return lambda organization_id=1, user_id=1: SessionRequest(organization_id, user_id, logs)


def ask(root, key, query="x"):
    """Return what the tool sees. `query` is a file that it tries to read, or `die`, which ends it."""
    transport = httpx.HTTPTransport(uds=str(control.find(root, key).socket))
    with httpx.Client(transport=transport, base_url="http://tool", timeout=60) as client:
        return client.get(f"/?{query}").json()


def sandboxes(root):
    """Return the processes of tools whose URL is below this owner's; each has its key in its arguments."""
    keys = {each.name for each in (root / control.SESSIONS_FOLDER).glob("*")}
    return [
        each for each in psutil.process_iter(["cmdline"])
        if any(f"/tools/{key}" in (each.info["cmdline"] or ()) for key in keys)
    ]  # fmt: skip


def test_a_tool_sees_its_logs_and_nothing_else(root, request_of, tmp_path):
    with owner_of_tools(root):
        key = control.start(root, request_of())
        seen = ask(root, key, str(tmp_path / "runs" / "secret"))
    assert (seen["view"], seen["event"], seen["prefix"]) == (["job-1"], "events", f"/tools/{key}")
    missing = "FileNotFoundError"
    assert (seen["asked"], seen["link"], seen["write"], seen["network"]) == (missing, missing, "OSError", ["lo"])
    allowed = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "sys", "proc", "dev", "tmp"}
    own = {Path(prefix).parts[1] for prefix in (sys.prefix, sys.base_prefix)}
    assert set(seen["root"]) <= allowed | own | {"logs", "view", "opt"}


def test_a_tool_is_started_only_once_its_session_can_be_found(root, request_of, monkeypatch):
    """Without its record, nobody could find the tool or end it."""
    monkeypatch.setattr(owner, "RECORD", "missing/record")
    with owner_of_tools(root):
        with pytest.raises(ToolsUnavailable):
            control.start(root, request_of())
        assert sandboxes(root) == []
        assert list((root / control.SESSIONS_FOLDER).iterdir()) == []


def test_a_tool_whose_limits_the_kernel_refuses_is_an_error_with_its_reason(root, request_of, monkeypatch):
    def refuse(_limits):
        raise PermissionError

    monkeypatch.setattr(owner.resource_limits, "apply_limits", refuse)
    with owner_of_tools(root), pytest.raises(ToolsUnavailable, match="preexec_fn"):
        control.start(root, request_of())


def test_sessions_are_limited_and_shared_by_the_same_request_only(root, request_of):
    with owner_of_tools(root, replace(LIMITS, per_organization=2, total=3)):
        first = control.start(root, request_of(1, 1))
        assert control.start(root, request_of(1, 1)) == first
        assert control.start(root, request_of(1, 2)) != first
        with pytest.raises(TooManySessions):
            control.start(root, request_of(1, 3))
        control.start(root, request_of(2, 1))
        with pytest.raises(TooManySessions):
            control.start(root, request_of(3, 1))
        with pytest.raises(ToolsUnavailable):
            control.start(root, SessionRequest(1, 1, ("no folder",)))  # the owner refuses it as malformed
        session = control.find(root, first)
        assert (session.organization_id, session.user_id) == (1, 1)
        for key in ("", "..", "../t/" + first, first + "/", first[:-1], first.swapcase()):
            assert control.find(root, key) is None
        tools = sandboxes(root)
        assert len(tools) >= 3  # a sandbox may have several processes
    assert psutil.wait_procs(tools, timeout=30)[1] == []
    assert list((root / control.SESSIONS_FOLDER).iterdir()) == []
    with pytest.raises(ToolsUnavailable):
        control.start(root, request_of())


def test_an_idle_session_ends_and_so_does_one_whose_tool_died(root, request_of):
    with owner_of_tools(root, replace(LIMITS, idle_seconds=300)):
        idle, used, dead = (control.start(root, request_of(1, user)) for user in (1, 2, 3))
        folder = control.find(root, idle).folder
        for key in (idle, used):
            ask(root, key)
            os.utime(control.find(root, key).folder / control.RECORD, (1, 1))  # last used in 1970
        control.find(root, used).mark_used()
        with pytest.raises(httpx.RemoteProtocolError):
            ask(root, dead, "die")
        wait_for(lambda: not control.find(root, idle) and not control.find(root, dead))
        wait_for(lambda: not folder.exists())
        assert ask(root, used)["view"] == ["job-1"]


def test_a_killed_owner_leaves_nothing_that_runs_and_the_next_cleans_up(root, request_of):
    serve = (
        "import sys; from pathlib import Path; from runtime.tools import owner;"
        f"owner.PROGRAM = Path({str(owner.PROGRAM)!r});"
        f"owner.Owner(Path({str(root)!r}), owner.{LIMITS!r}, '/tools/{{}}'.format).serve()"
    )
    process = subprocess.Popen([sys.executable, "-c", serve], cwd=Path(__file__).parents[2])
    try:
        wait_for((root / control.CONTROL_SOCKET).exists)
        key = control.start(root, request_of())
        ask(root, key)
        tools = sandboxes(root)
        assert tools
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert psutil.wait_procs(tools, timeout=30)[1] == []
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(control.find(root, key).socket))
    with owner_of_tools(root):
        assert control.find(root, key) is None
        assert ask(root, control.start(root, request_of()))["view"] == ["job-1"]
