"""A process gets a network of its own, as root or as another user. It cannot return, so tests use new processes."""

import ctypes
import multiprocessing
import os
from pathlib import Path

import pytest

from runtime.backends import network
from runtime.backends.local.warm_pool import client

NOBODY = 65534
PR_SET_DUMPABLE = 4


def in_a_new_process(action):
    """Return what the function returns in a process of its own.

    A fork of the test process would not do: a library may start a thread in each fork, and the kernel gives a process
    with threads no user namespace.
    """
    spawn = multiprocessing.get_context("spawn")
    answer, writer = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send_result, args=(action, writer))
    process.start()
    writer.close()
    result = answer.recv()
    process.join()
    return result


def _send_result(action, writer):
    writer.send(action())


def enter_and_look():
    """Give this process its own network; return what it then finds."""
    before = str(Path("/proc/self/ns/net").readlink())
    why = network.enter()
    lines = Path("/proc/net/dev").read_text().splitlines()
    devices = [line.split(":")[0].strip() for line in lines if ":" in line]
    with network.listen() as listener, network.reserve_port() as held:
        ports = {listener.getsockname()[1], held.getsockname()[1]}
        return {
            "problem": why,
            "has_moved": str(Path("/proc/self/ns/net").readlink()) != before,
            "devices": devices,
            "ports": len(ports),
            "ids": (os.getuid(), os.getgid()),
        }


def as_nobody():
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # After a change of its user, a process cannot open its own /proc until it executes a program or sets this.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    return enter_and_look()


def enter_without_rights():
    os.setresuid(NOBODY, NOBODY, NOBODY)  # now it cannot open its own /proc, so `enter` fails half-way
    return [network.enter(), os.getuid()]


@pytest.mark.parametrize(("enter", "user"), [(enter_and_look, 0), (as_nobody, NOBODY)], ids=["root", "another user"])
def test_a_process_gets_a_network_of_its_own_and_keeps_its_user_id(enter, user):
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    assert in_a_new_process(enter) == {
        "problem": "", "has_moved": True, "devices": ["lo"], "ports": 2, "ids": (user, user),
    }  # fmt: skip


def test_a_refused_namespace_changes_nothing():
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    # The text counts: the id would also be 65534 in a new user namespace that has no map of users.
    refusal = "The kernel refuses a network namespace: Permission denied."
    assert in_a_new_process(enter_without_rights) == [refusal, NOBODY]


def test_the_check_for_networks_does_not_move_the_console():
    before = str(Path("/proc/self/ns/net").readlink())
    assert client.network_gap() == ""
    assert str(Path("/proc/self/ns/net").readlink()) == before
