"""A network of its own, for root and for an ordinary user. Each try is a process that ends with it."""

import ctypes
import json
import os
from pathlib import Path

import pytest

from runtime.backends import network
from runtime.backends.local.warm_pool import client

NOBODY = 65534
PR_SET_DUMPABLE = 4


def in_a_fork(action):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            result = action()
        except BaseException as error:  # whatever it is, it is the test's answer
            result = repr(error)
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        result = json.loads(answer.read())
    os.waitpid(child, 0)
    return result


def enter_and_look():
    before = str(Path("/proc/self/ns/net").readlink())
    why = network.enter()
    lines = Path("/proc/net/dev").read_text().splitlines()
    devices = [line.split(":")[0].strip() for line in lines if ":" in line]
    with network.listen() as listener, network.reserve_port() as held:
        ports = {listener.getsockname()[1], held.getsockname()[1]}
        return [why, str(Path("/proc/self/ns/net").readlink()) != before, devices, len(ports), os.getuid(), os.getgid()]


def as_nobody():
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # Who has changed his user cannot reach his own /proc until he executes something; a real user has.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    return enter_and_look()


@pytest.mark.parametrize(("enter", "user"), [(enter_and_look, 0), (as_nobody, NOBODY)], ids=["root", "another user"])
def test_a_process_gets_a_network_of_its_own_and_keeps_its_user_id(enter, user):
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    assert in_a_fork(enter) == ["", True, ["lo"], 2, user, user]


def test_a_refused_namespace_changes_nothing():
    if os.geteuid():
        pytest.skip("only root can become somebody else")

    def refused():
        os.setresuid(NOBODY, NOBODY, NOBODY)  # and cannot reach his own /proc: the attempt fails half-way
        return [network.enter(), os.getuid()]

    # In a user namespace without a map he would be 65534 as well, and could write to nothing.
    assert in_a_fork(refused) == ["The kernel refuses a network namespace: Permission denied.", NOBODY]


def test_the_check_for_networks_does_not_move_the_console():
    before = str(Path("/proc/self/ns/net").readlink())
    assert client.network_gap() == ""
    assert str(Path("/proc/self/ns/net").readlink()) == before
