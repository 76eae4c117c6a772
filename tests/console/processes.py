"""Helpers for tests of real processes."""

import socket
import time
from pathlib import Path

import pytest


def wait_for(condition, seconds=30.0):
    """Wait until `condition()` is true, and return its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    return pytest.fail(f"waited {seconds} s for {condition}, which did not become true")


def children(pid):
    """Return the pids of a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def free_port():
    """Return a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
