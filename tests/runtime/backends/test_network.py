"""A network of its own, for root and for an ordinary user. Each try is a process that ends with it."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.backends import keeper, network

NOBODY = 65534
PR_SET_DUMPABLE = 4


def in_a_fork(action: Callable[[], Any]) -> Any:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            told = action()
        except BaseException as error:  # whatever it is, it is the test's answer
            told = repr(error)
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        told = json.loads(answer.read())
    os.waitpid(child, 0)
    return told


def enter_and_look() -> list[Any]:
    before = str(Path("/proc/self/ns/net").readlink())
    why = network.enter()
    lines = Path("/proc/net/dev").read_text().splitlines()
    devices = [line.split(":")[0].strip() for line in lines if ":" in line]
    with network.listen() as listener, network.reserve_port() as held:
        ports = {listener.getsockname()[1], held.getsockname()[1]}
        return [why, str(Path("/proc/self/ns/net").readlink()) != before, devices, len(ports), os.getuid(), os.getgid()]


def as_nobody() -> list[Any]:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # Who has changed his user cannot reach his own /proc until he executes something; a real user has.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    return enter_and_look()


def test_root_gets_one() -> None:
    if os.geteuid():
        pytest.skip("for root")
    assert in_a_fork(enter_and_look) == ["", True, ["lo"], 2, 0, 0]


def test_an_ordinary_user_gets_one_and_stays_who_he_is() -> None:
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    assert in_a_fork(as_nobody) == ["", True, ["lo"], 2, NOBODY, NOBODY]


def test_a_user_who_gets_none_is_where_he_was() -> None:
    if os.geteuid():
        pytest.skip("only root can become somebody else")

    def refused() -> list[Any]:
        os.setresuid(NOBODY, NOBODY, NOBODY)  # and cannot reach his own /proc: the attempt fails half-way
        return [network.enter(), os.getuid()]

    # In a user namespace without a map he would be 65534 as well, and could write to nothing.
    assert in_a_fork(refused) == ["The kernel gives no network namespace: Permission denied.", NOBODY]


def test_whether_there_are_any_is_found_out_beside_the_console() -> None:
    before = str(Path("/proc/self/ns/net").readlink())
    assert keeper.network_gap() == ""
    assert str(Path("/proc/self/ns/net").readlink()) == before
