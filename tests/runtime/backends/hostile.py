"""Shared parts of the tests of isolation: both ways to start ranks, and scripts that try what the sandbox forbids."""

import json

import pytest

from tests.console.processes import wait_for
from tests.runtime.conftest import MAY_IMPORT_ANYTHING

STARTS = ("cold", pytest.param("warm", marks=pytest.mark.slow))
"""The ways to start ranks. In `make test`, only `test_isolation_warm` shows that warm ranks have the sandbox of cold
ones."""
TRY = """
    import ctypes, json, os, socket
    def attempt(action, *arguments):
        try:
            return str(action(*arguments))
        except OSError as error:
            return type(error).__name__
    def read(path):
        with open(path, "rb") as file: return file.read(100)
    def write(path):
        with open(path, "w") as file: return file.write("x")
    def update(path):
        with open(path, "r+"): return "opened"
    def connect(address):
        if isinstance(address, tuple):
            with socket.create_connection(address, timeout=2): return "reached"
        with socket.socket(socket.AF_UNIX) as one: return one.connect(address) or "reached"
"""
"""The functions that the expressions of `evaluate` may call."""


def evaluate(harness, expressions):
    """Evaluate expressions, and lists of them, in one run. Return the values by the same names."""
    parts = (
        f"{name!r}: {part if isinstance(part, str) else '[' + ', '.join(part) + ']'}"
        for name, part in expressions.items()
    )
    harness.complete(f"{TRY}    print(json.dumps({{{', '.join(parts)}}}))")
    return json.loads(harness.log())


def attempts(action, *arguments):
    """Return an expression for each argument: its value is what the action returns, or the name of its error."""
    return [f"attempt({action}, {argument!r})" for argument in arguments]


def choose_start(harness, how):
    """Return the harness; its ranks start a new interpreter (`cold`) or are forked from a prepared one (`warm`)."""
    if how == "warm":
        warm(harness)
    return harness


def warm(harness):
    """Start every later run of this harness warm. Waits for the fork server of its image."""
    harness.backend = harness.new_backend(warm_seconds=600)  # the pool ends this long after the last submission
    harness.complete("", name="first")  # starts cold, and prepares the ranks of the next ones
    harness.backend.delete("first")
    wait_for(lambda: is_warm(harness), harness.patience)
    harness.preface = MAY_IMPORT_ANYTHING  # scripts without it start cold


def is_warm(harness):
    """Return whether the next run of this harness starts warm: there is the socket of a fork server."""
    folder = harness.folder / "runs" / ".warm_pool"
    return any(path.is_socket() and path.name != "daemon.sock" for path in folder.glob("*"))
