"""The system call filter, interpreted as the kernel does."""

import errno
import struct

import pytest

from runtime.launcher import seccomp

ALLOWED = "allowed"
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SOCKETS = {"x86_64": {"socket": 41, "socketpair": 53}, "aarch64": {"socket": 198, "socketpair": 199}}


def decide(machine, number, *arguments, architecture=None, pids=None):
    """Run the filter of a sandbox or of a Pod for one call; return `allowed` or the name of the error."""
    program = seccomp.sandbox_filter(machine) if pids is None else seccomp.pod_filter(pids, machine)
    assert program is not None
    lines = list(struct.iter_unpack("<HBBI", program))
    six = (*arguments, *[0] * 6)[:6]
    six = tuple(argument & (1 << 64) - 1 for argument in six)
    data = struct.pack("<iIQ6Q", number, ARCHITECTURES[machine] if architecture is None else architecture, 0, *six)
    value, at = 0, 0
    while True:
        code, yes, no, operand = lines[at]
        at += 1
        if code == 0x20:  # load a word
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:  # return
            return ALLOWED if operand == 0x7FFF0000 else errno.errorcode[operand & 0xFFFF]
        else:  # a conditional jump
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += yes if holds else no


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 1), ("aarch64", 2)])
def test_exactly_the_listed_system_calls_are_refused(machine, column):
    refused = {line[column]: errno.errorcode[line[3]] for line in seccomp._REFUSED_CALLS if line[column]}
    assert len(refused) > 30, "the list was found"
    refused[424] = "ENOSYS"  # pidfd_send_signal
    decided_by_arguments = set(SOCKETS[machine].values())  # their first argument is 0 here
    for number in set(range(600)) - decided_by_arguments:  # more numbers than there are calls
        assert decide(machine, number) == refused.get(number, ALLOWED), number


@pytest.mark.parametrize(("machine", "fcntl", "clone", "unshare"), [("x86_64", 72, 56, 272), ("aarch64", 25, 220, 97)])
def test_calls_are_refused_by_their_arguments(machine, fcntl, clone, unshare):
    # F_SETLEASE (1024) is refused, and so are new user namespaces (CLONE_NEWUSER, 0x10000000).
    assert decide(machine, fcntl, 3, 1024) == "EPERM"
    assert decide(machine, fcntl, 3, 1024 | 1 << 32) == "EPERM", "the kernel looks at 32 bits of it"
    assert {decide(machine, fcntl, 3, command) for command in (0, 1, 2, 3, 4, 1025, 1030, 1031)} == {ALLOWED}
    for call in (clone, unshare):
        assert decide(machine, call, 0x10000000 | 17) == "EPERM"
        assert decide(machine, call, 0x00020000 | 17) == ALLOWED, "a new mount namespace"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("call", ["socket", "socketpair"])
def test_only_the_socket_families_of_training_are_allowed(machine, call):
    number = SOCKETS[machine][call]
    allowed = {family for family in range(64) if decide(machine, number, family, 1, 0) == ALLOWED}
    assert allowed == {1, 2, 10, 16}, "unix, inet, inet6, netlink"
    assert decide(machine, number, 40, 1, 0) == "EAFNOSUPPORT", "vsock has no network namespaces"
    assert {decide(machine, number, 16, 3, protocol) for protocol in range(1, 32)} == {"EPROTONOSUPPORT"}, (
        "of netlink, only routing"
    )


OTHER = 77
"""A process that is not the launcher, which has pid 1."""
TARGETED_CALLS = {
    # name: numbers on x86_64 and aarch64, arguments that would affect the launcher, arguments that do not
    "kill": (62, 129, [(1, 2)], [(OTHER, 9), (0, 15), (-OTHER, 9), (1, 0)]),
    "tkill": (200, 130, [(1, 2)], [(OTHER, 9)]),
    "tgkill": (234, 131, [(1, 1, 2), (1, OTHER, 2), (OTHER, 1, 2)], [(OTHER, OTHER, 9)]),
    "rt_sigqueueinfo": (129, 138, [(1, 2)], [(OTHER, 9)]),
    "rt_tgsigqueueinfo": (297, 240, [(1, 1, 2), (1, OTHER, 2)], [(OTHER, OTHER, 9)]),
    "pidfd_send_signal": (424, 424, [(3, 2), (4, 9)], []),
    "prlimit64": (302, 261, [(1, 0), (OTHER, 7)], [(0, 7)]),
    # The first argument tells what the second one is: 0 a process, 1 a process group, 2 a user. For ioprio_set: 1 to 3.
    "setpriority": (141, 140, [(0, 1, 19), (1, 1, 19), (2, 0, 19), (2, 1000, 19)], [(0, 0, 19), (0, OTHER, 1)]),
    "ioprio_set": (251, 30, [(1, 1), (2, 1), (3, 0), (3, 1000)], [(1, 0), (1, OTHER)]),
    "sched_setscheduler": (144, 119, [(1, 5)], [(0, 5), (OTHER, 5)]),
    "sched_setparam": (142, 118, [(1,)], [(0,), (OTHER,)]),
    "sched_setattr": (314, 274, [(1,)], [(0,), (OTHER,)]),
    "sched_setaffinity": (203, 122, [(1, 8)], [(0, 8), (OTHER, 8)]),
    # F_SETOWN is 8, F_SETOWN_EX 15, FIOSETOWN 0x8901 and SIOCSPGRP 0x8902: the kernel then signals the new owner.
    "fcntl": (72, 25, [(3, 8, 1), (3, 8, -1), (3, 15, 1 << 40)], [(3, 8, OTHER), (3, 8, 0), (3, 4, 1), (3, 1, 0)]),
    "ioctl": (16, 29, [(3, 0x8901), (3, 0x8902)], [(3, 0x5401), (3, 0x541B)]),
}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("call", TARGETED_CALLS)
def test_system_calls_cannot_target_the_launcher(machine, call):
    x86_64, aarch64, refused, allowed = TARGETED_CALLS[call]
    number = {"x86_64": x86_64, "aarch64": aarch64}[machine]
    for pids in (None, (1, 33)):  # a sandbox's filter, and a Pod's that protects two processes
        assert {decide(machine, number, *arguments, pids=pids) for arguments in refused} <= {
            "EPERM",
            "ENOSYS",
        }
        assert {decide(machine, number, *arguments, pids=pids) for arguments in allowed} <= {ALLOWED}


def test_signals_to_all_processes_cannot_reach_a_pods_launcher():
    kill, pids = 62, (1, 33)  # the Pod's first process, and the launcher
    assert {decide("x86_64", kill, pid, 9, pids=pids) for pid in (1, 33, -33, -1)} == {"EPERM"}
    assert {decide("x86_64", kill, pid, 9, pids=pids) for pid in (34, -34, 0)} == {ALLOWED}
    assert decide("x86_64", SOCKETS["x86_64"]["socket"], 40, 1, 0, pids=pids) == "EAFNOSUPPORT", "vsock"
    # inotify_init, inotify_init1, clone3
    assert {decide("x86_64", number, pids=pids) for number in (253, 294, 435)} == {ALLOWED}, (
        "in a Pod the container runtime filters these"
    )


def test_system_calls_of_other_architectures_are_refused(monkeypatch):
    getpid = 39
    assert decide("x86_64", getpid, architecture=0x40000003) == "ENOSYS", "a 32-bit process"
    assert decide("x86_64", getpid | 0x40000000) == "ENOSYS", "a call of the x32 ABI"
    assert seccomp.sandbox_filter("riscv64") is None
    assert seccomp.unavailable_reason() == ""
    monkeypatch.setattr(seccomp, "sandbox_filter", lambda: None)
    assert "There is no filter" in seccomp.unavailable_reason()
