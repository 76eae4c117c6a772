"""Which calls of the kernel the code of a run may not make, as a program of seccomp's. PURE but for the machine's name.

The sandbox decides what is *seen*; this is about calls that reach past it, since what runs in it has the console's own
user on the machine (root's, where root runs the console), and shares with it what the kernel counts or locks by user:

    leases     on a file that it may only read a run could keep everybody else, the machine's own programs and other
               customers' imports among them, from opening it for 45 seconds, again and again
    keyrings   of the user: what one run puts there, another reads
    notices    of changed files (inotify): a machine has 128 of them for each user, and the console needs some
    namespaces of its own, in which code is root again and meets most of what kernels had wrong in recent years
    the rest   what only administrators need, and what goes past this very list (io_uring)

The one rule: what training needs is not in here (a container of Docker's lacks more). What is refused fails as it would
on a machine that does not have it, so that libraries fall back on what there is.
"""

from __future__ import annotations

import errno
import os
import struct

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Dict, List, Optional, Tuple

_F_SETLEASE = 1024
_CLONE_NEWUSER = 0x10000000
_OTHER_ABI = 0x40000000
"""Numbers from here on are x86-64's second set of calls (x32)."""
_NAMES = (
    # name, numbers on x86_64 and aarch64 (0: not there), how it fails
    ("add_key", 248, 217, errno.EPERM),
    ("request_key", 249, 218, errno.EPERM),
    ("keyctl", 250, 219, errno.EPERM),
    ("inotify_init", 253, 0, errno.EMFILE),
    ("inotify_init1", 294, 26, errno.EMFILE),
    ("fanotify_init", 300, 262, errno.EPERM),
    ("io_uring_setup", 425, 425, errno.ENOSYS),
    ("io_uring_enter", 426, 426, errno.ENOSYS),
    ("io_uring_register", 427, 427, errno.ENOSYS),
    # Its flags lie where no filter can see them. Whoever is told that there is none takes `clone`.
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
# Refused where one argument says so: name, numbers, which argument, what it is or has in it.
_EQUALS, _HAS = 0x15, 0x45
_BY_ARGUMENT = (
    ("fcntl", 72, 25, 1, _EQUALS, _F_SETLEASE),
    ("unshare", 272, 97, 0, _HAS, _CLONE_NEWUSER),
    ("clone", 56, 220, 0, _HAS, _CLONE_NEWUSER),
)
_MACHINES: Dict[str, Tuple[int, int]] = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Which column, and the kernel's word for the machine's set of calls."""
_LOAD, _AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_INSTRUCTION = struct.Struct("<HBBI")


def program(machine: str = "") -> Optional[bytes]:
    """The filter as the kernel takes it (an array of `struct sock_filter`); None for a machine that is not known."""
    known = _MACHINES.get(machine or os.uname().machine)
    if known is None:
        return None
    column, word = known
    lines: List[Tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUALS, 1, 0, word),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if not column:
        lines += [(_AT_LEAST, 0, 1, _OTHER_ABI), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    for _name, *numbers, place, test, value in _BY_ARGUMENT:
        lines += [
            (_EQUALS, 0, 4, numbers[column]),
            (_LOAD, 0, 0, _ARGUMENTS + 8 * place),
            (test, 0, 1, value),
            (_RETURN, 0, 0, _FAIL | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    for _name, *numbers, number_of_error in _NAMES:
        if numbers[column]:
            lines += [(_EQUALS, 0, 1, numbers[column]), (_RETURN, 0, 0, _FAIL | number_of_error)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(_INSTRUCTION.pack(*line) for line in lines)


def why_not() -> str:
    """Why calls are not refused here, one English sentence; "" where they are."""
    if program() is None:
        return "It is not known how on a machine of the kind '{}'.".format(os.uname().machine)
    try:
        with open("/proc/self/status") as file:
            told = any(line.startswith("Seccomp:") for line in file)
    except OSError:
        told = False
    return "" if told else "This kernel has no seccomp."
