"""Build the seccomp filters that refuse some system calls to a run's code. Pure, except for `install_filter`.

The sandbox decides which files and processes a run can see. The filter refuses calls whose effects go beyond the
sandbox. Code in a sandbox runs as the console's user (root, if root runs the console). Runs and the console therefore
share every resource that the kernel counts or locks per user. The filter refuses:

    leases     Linux grants a lease even on a file that the run can only read. The lease would block all others that
               open the file, for 45 seconds each time.
    keyrings   They belong to the user, so one run could read another run's keys.
    inotify    Instances are limited per user (128 by default), and the console needs some.
    namespaces In its own user namespace, code is root, and can reach most of the kernel's past bugs.
    sockets    Some families ignore network namespaces (vsock). Training needs few families.
    others     Calls for administrators, and io_uring, which bypasses this filter.

A second part of the filter protects the launcher, which runs as the same user. Code cannot send it signals, or set its
resource limits, priority or scheduling class. Pods get only this part (`pod_filter`), since a container runtime has a
filter of its own. They are also refused vsock sockets, which the filters of older runtimes allow.

The filter refuses no call that training needs; Docker's default filter refuses more calls. If libraries have a fallback
for a refused call, the call fails with the error that makes them use the fallback, such as ENOSYS.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

LAUNCHER_PID = 1
"""The launcher's pid in a sandbox, where it is the first process of its pid namespace."""
# Constants from the kernel's headers.
_F_SETLEASE = 1024
_F_SETOWN, _F_SETOWN_EX = 8, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_CLONE_NEWUSER = 0x10000000
_PRIO_USER, _IOPRIO_WHO_USER = 2, 3
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK, _AF_VSOCK = 1, 2, 10, 16, 40
_NETLINK_ROUTE = 0
_FIRST_X32_CALL = 0x40000000
"""The lowest number of a call of the x32 ABI, which x86-64 kernels may also serve. These calls would bypass the rules,
so all of them are refused."""
# Calls that are refused with any arguments.
_REFUSED_CALLS = (
    # name, number on x86_64, number on aarch64 (0: does not exist), error
    ("add_key", 248, 217, errno.EPERM),
    ("request_key", 249, 218, errno.EPERM),
    ("keyctl", 250, 219, errno.EPERM),
    # As if the user's limit of inotify instances were reached, which libraries expect.
    ("inotify_init", 253, 0, errno.EMFILE),
    ("inotify_init1", 294, 26, errno.EMFILE),
    ("fanotify_init", 300, 262, errno.EPERM),
    ("io_uring_setup", 425, 425, errno.ENOSYS),
    ("io_uring_enter", 426, 426, errno.ENOSYS),
    ("io_uring_register", 427, 427, errno.ENOSYS),
    # The flags of `clone3` are in memory, which a filter cannot read. After ENOSYS, libraries use `clone`, whose flags
    # are checked.
    ("clone3", 435, 435, errno.ENOSYS),
    ("setns", 308, 268, errno.EPERM),
    ("mount", 165, 40, errno.EPERM),
    ("umount2", 166, 39, errno.EPERM),
    ("pivot_root", 155, 41, errno.EPERM),
    ("open_tree", 428, 428, errno.EPERM),
    ("move_mount", 429, 429, errno.EPERM),
    ("fsopen", 430, 430, errno.EPERM),
    ("fsconfig", 431, 431, errno.EPERM),
    ("fsmount", 432, 432, errno.EPERM),
    ("fspick", 433, 433, errno.EPERM),
    ("mount_setattr", 442, 442, errno.EPERM),
    ("open_tree_attr", 467, 467, errno.EPERM),
    ("bpf", 321, 280, errno.EPERM),
    ("perf_event_open", 298, 241, errno.EPERM),
    ("userfaultfd", 323, 282, errno.EPERM),
    ("open_by_handle_at", 304, 265, errno.EPERM),
    ("init_module", 175, 105, errno.EPERM),
    ("finit_module", 313, 273, errno.EPERM),
    ("delete_module", 176, 106, errno.EPERM),
    ("kexec_load", 246, 104, errno.EPERM),
    ("kexec_file_load", 320, 294, errno.EPERM),
    ("swapon", 167, 224, errno.EPERM),
    ("swapoff", 168, 225, errno.EPERM),
    ("reboot", 169, 142, errno.EPERM),
    ("acct", 163, 89, errno.EPERM),
    ("quotactl", 179, 60, errno.EPERM),
    ("quotactl_fd", 443, 443, errno.EPERM),
    ("syslog", 103, 116, errno.EPERM),
    ("settimeofday", 164, 170, errno.EPERM),
    ("clock_settime", 227, 112, errno.EPERM),
    ("clock_adjtime", 305, 266, errno.EPERM),
    ("iopl", 172, 0, errno.EPERM),
    ("ioperm", 173, 0, errno.EPERM),
    ("modify_ldt", 154, 0, errno.ENOSYS),
)
# Calls that act on a process or thread: name, number on x86_64 and on aarch64, position of the argument with its pid.
_PROCESS_CALLS = (
    ("setpriority", 141, 140, 1),
    ("ioprio_set", 251, 30, 1),
    ("sched_setscheduler", 144, 119, 0),
    ("sched_setparam", 142, 118, 0),
    ("sched_setattr", 314, 274, 0),
    ("sched_setaffinity", 203, 122, 0),
)
# Calls that send a signal: name, numbers, positions of the arguments with a process or thread, position of the signal.
_SIGNAL_CALLS = (
    ("kill", 62, 129, (0,), 1),
    ("tkill", 200, 130, (0,), 1),
    ("tgkill", 234, 131, (0, 1), 2),
    ("rt_sigqueueinfo", 129, 138, (0,), 1),
    ("rt_tgsigqueueinfo", 297, 240, (0, 1), 2),
)
# BPF instructions: load a 32-bit word; jump if equal, if any of these bits is set, if at least; return.
_LOAD, _EQUALS, _HAS_BITS, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
# SECCOMP_RET_ALLOW, and SECCOMP_RET_ERRNO, to which the error's number is added.
_RETURN_ALLOW, _RETURN_ERROR = 0x7FFF0000, 0x00050000
# Offsets in `struct seccomp_data`. Each argument has 8 bytes.
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
# `struct sock_filter`: instruction, instructions to skip if true and if false, operand.
_INSTRUCTION = struct.Struct("<HBBI")
_Instruction = Tuple[int, int, int, int]
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ARCHITECTURES: Dict[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's constant for each architecture."""


class _Condition(NamedTuple):
    """A condition on the low 32 bits of the argument at `position`; the kernel ignores the upper bits.

    `comparison` is a BPF instruction that compares the bits with `value`. `must_hold`: whether its result must be true.
    """

    position: int
    comparison: int
    value: int
    must_hold: bool


class _Rule(NamedTuple):
    """A call to refuse with `error` if all conditions are met. It has a number per architecture (0: no such call)."""

    name: str
    x86_64: int
    aarch64: int
    error: int
    conditions: Tuple[_Condition, ...] = ()


def _equals(position: int, value: int) -> _Condition:
    # A negative number, such as a process group in `kill`, is compared as the same 32 bits without a sign.
    return _Condition(position, _EQUALS, value & 0xFFFFFFFF, must_hold=True)


def _differs(position: int, value: int) -> _Condition:
    return _Condition(position, _EQUALS, value, must_hold=False)


def _has_bits(position: int, value: int) -> _Condition:
    return _Condition(position, _HAS_BITS, value, must_hold=True)


def sandbox_filter(machine: str = "") -> Optional[bytes]:
    """Return a sandbox's filter as an array of `struct sock_filter`; None on an unknown architecture.

    `machine` is as in `uname -m`; default: this machine's.
    """
    rules = [
        _Rule("fcntl", 72, 25, errno.EPERM, (_equals(1, _F_SETLEASE),)),
        _Rule("unshare", 272, 97, errno.EPERM, (_has_bits(0, _CLONE_NEWUSER),)),
        _Rule("clone", 56, 220, errno.EPERM, (_has_bits(0, _CLONE_NEWUSER),)),
    ]
    # All families except these four, and all netlink protocols except routing, are refused.
    other_family = tuple(_differs(0, family) for family in (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK))
    other_netlink = (_equals(0, _AF_NETLINK), _differs(2, _NETLINK_ROUTE))
    for name, x86_64, aarch64 in (("socket", 41, 198), ("socketpair", 53, 199)):
        rules.append(_Rule(name, x86_64, aarch64, errno.EAFNOSUPPORT, other_family))
        rules.append(_Rule(name, x86_64, aarch64, errno.EPROTONOSUPPORT, other_netlink))
    refused_calls = [_Rule(*call) for call in _REFUSED_CALLS]
    return _build_filter(machine, [*rules, *_protection_rules((LAUNCHER_PID,)), *refused_calls])


def pod_filter(protected_pids: Sequence[int], machine: str = "") -> Optional[bytes]:
    """Return a filter that protects these pids and refuses vsock sockets; None on an unknown architecture."""
    vsock = _Rule("socket", 41, 198, errno.EAFNOSUPPORT, (_equals(0, _AF_VSOCK),))
    return _build_filter(machine, [vsock, *_protection_rules(protected_pids)])


def _protection_rules(pids: Sequence[int]) -> List[_Rule]:
    """Return rules that protect these processes: no call with such a pid may end, stop, starve or signal them.

    Each pid is also the number of a process group, which is protected as well. Code may still do all this to its own
    processes, with one exception: it may set resource limits only for the calling process (`prlimit64` of pid 0).

    Calls that name a thread can still reach the other threads of these processes, whose numbers no filter can know. A
    pod's launcher that is killed in this way counts as killed by the code.
    """
    rules = [
        _Rule("prlimit64", 302, 261, errno.EPERM, (_differs(0, 0),)),
        _Rule("setpriority", 141, 140, errno.EPERM, (_equals(0, _PRIO_USER),)),
        _Rule("ioprio_set", 251, 30, errno.EPERM, (_equals(0, _IOPRIO_WHO_USER),)),
        # A filter cannot see which process a pidfd refers to. After ENOSYS, libraries use `kill`.
        _Rule("pidfd_send_signal", 424, 424, errno.ENOSYS),
        # The kernel sends a file's signals to its owner. These calls pass the new owner in memory, which a filter
        # cannot read.
        _Rule("fcntl", 72, 25, errno.EPERM, (_equals(1, _F_SETOWN_EX),)),
        _Rule("ioctl", 16, 29, errno.EPERM, (_equals(1, _FIOSETOWN),)),
        _Rule("ioctl", 16, 29, errno.EPERM, (_equals(1, _SIOCSPGRP),)),
    ]
    for pid in pids:
        for name, x86_64, aarch64, position in _PROCESS_CALLS:
            rules.append(_Rule(name, x86_64, aarch64, errno.EPERM, (_equals(position, pid),)))
        # Signal 0, which only tests whether a process exists, is harmless.
        for name, x86_64, aarch64, pid_positions, signal_position in _SIGNAL_CALLS:
            for position in pid_positions:
                conditions = (_equals(position, pid), _differs(signal_position, 0))
                rules.append(_Rule(name, x86_64, aarch64, errno.EPERM, conditions))
        if pid != 1:
            # Signals to the process's group (-pid) and to all processes (-1) would reach it, so they are refused. The
            # kernel exempts the first process of a namespace (pid 1) from such signals.
            rules += [_Rule("kill", 62, 129, errno.EPERM, (_equals(0, group), _differs(1, 0))) for group in (-pid, -1)]
        rules += [
            _Rule("fcntl", 72, 25, errno.EPERM, (_equals(1, _F_SETOWN), _equals(2, owner))) for owner in (pid, -pid)
        ]
    return rules


def _build_filter(machine: str, rules: Sequence[_Rule]) -> Optional[bytes]:
    """Return a filter that refuses calls by these rules and allows all others; None on an unknown architecture."""
    machine = machine or os.uname().machine
    architecture = _ARCHITECTURES.get(machine)
    if architecture is None:
        return None
    # Call numbers differ between architectures, so a call of another one (32-bit code) is refused.
    instructions: List[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_EQUALS, 1, 0, architecture),
        (_RETURN, 0, 0, _RETURN_ERROR | errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        instructions += [(_AT_LEAST, 0, 1, _FIRST_X32_CALL), (_RETURN, 0, 0, _RETURN_ERROR | errno.ENOSYS)]
    for rule in rules:
        number = rule.x86_64 if machine == "x86_64" else rule.aarch64
        if number:
            instructions += _rule_instructions(number, rule.error, rule.conditions)
    instructions.append((_RETURN, 0, 0, _RETURN_ALLOW))
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in instructions)


def _rule_instructions(number: int, error: int, conditions: Sequence[_Condition]) -> List[_Instruction]:
    """Return the instructions that refuse one call under these conditions.

    They expect the call's number to be loaded, and leave it loaded for the next rule's instructions.
    """
    # Each condition takes two instructions, a load and a comparison; then comes the return. If the number differs, all
    # of them are skipped, and with them the last load, which only conditions need.
    skipped = 2 * len(conditions) + 1
    instructions = [(_EQUALS, 0, skipped + (1 if conditions else 0), number)]
    for condition in conditions:
        skipped -= 2  # if this condition is not met, everything up to the last load is skipped
        instructions.append((_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * condition.position))
        jumps = (0, skipped) if condition.must_hold else (skipped, 0)
        instructions.append((condition.comparison, *jumps, condition.value))
    instructions.append((_RETURN, 0, 0, _RETURN_ERROR | error))
    if conditions:
        instructions.append((_LOAD, 0, 0, _NUMBER_OFFSET))
    return instructions


def install_filter(filter_bytes: bytes) -> None:
    """Install a filter for this process and its children, for good. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = ctypes.create_string_buffer(filter_bytes, len(filter_bytes))
    # `struct sock_fprog`: the number of instructions and their address.
    program = struct.pack("HxxxxxxP", len(filter_bytes) // _INSTRUCTION.size, ctypes.addressof(instructions))
    for request in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program)):
        if libc.prctl(*request, 0, 0):
            raise OSError(ctypes.get_errno(), "the filter of calls was refused")


def unavailable_reason() -> str:
    """Return why system calls are not filtered here, as an English sentence; "" if they are filtered."""
    if sandbox_filter() is None:
        return "There is no filter for the architecture of this machine, '{}'.".format(os.uname().machine)
    try:
        with open("/proc/self/status") as file:
            has_seccomp = any(line.startswith("Seccomp:") for line in file)
    except OSError:
        has_seccomp = False
    return "" if has_seccomp else "This kernel has no seccomp."
