"""What tests of real processes need."""

import socket
import time

import pytest


def wait_for(condition, seconds=30.0):
    """Wait until `condition()` is true, and give its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    return pytest.fail(f"waited {seconds} s in vain for {condition}")


def free_port():
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
