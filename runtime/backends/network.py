"""The network of a run: a namespace of its own that leads nowhere, where the kernel lets us.

The one rule: whoever calls `enter` is in it from then on, with all that it starts. The namespace has no name and no
mount: it lives as long as a process in it does, so nothing of it can be left behind. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

ADDRESS = "127.0.0.1"
INTERFACE = "lo"
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_SIOCSIFADDR = 0x8916
_SIOCBRADDBR = 0x89A0
_UP_AND_RUNNING = 0x1 | 0x40
_unshare = ctypes.CDLL(None, use_errno=True).unshare
_BRIDGE = "mpi0"
_BRIDGE_ADDRESS = "169.254.77.1"


def enter() -> str:
    """Move this process, which must have one thread, into a new network. Returns why that is not to be had, or "".

    An ordinary user may do that only in a user namespace of his own, in which he stays who he is. Whoever holds no
    right outside gains none by it: it owns this network and what is nested in it, nothing else.
    """
    if not _unshare(_CLONE_NEWNET):
        _raise(INTERFACE)
        return ""
    # There is no way back from half of this, so somebody else tries first.
    child = os.fork()
    if not child:
        try:
            _enter_as_user()
        except OSError as error:
            os._exit(error.errno or errno.EPERM)
        os._exit(0)
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number:
        return f"The kernel gives no network namespace: {os.strerror(number)}."
    _enter_as_user()
    return ""


def add_bridge() -> str:
    """Give the network a second interface, which leads nowhere. Returns why that is not to be had, or "".

    Open MPI's daemons take no address of loopback for one that they could be reached at, even where there is no other.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _SIOCBRADDBR, _BRIDGE.encode() + b"\0")
            address = struct.pack("16sHH4s8x", _BRIDGE.encode(), socket.AF_INET, 0, socket.inet_aton(_BRIDGE_ADDRESS))
            fcntl.ioctl(control, _SIOCSIFADDR, address)
        _raise(_BRIDGE)
    except OSError as error:
        return f"The kernel gives no bridge: {error.strerror}."
    return ""


def _enter_as_user() -> None:
    user, group = os.geteuid(), os.getegid()
    if _unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no namespaces")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _raise(INTERFACE)


def _raise(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", interface.encode(), _UP_AND_RUNNING))


def main() -> None:
    """Try it, in a process that ends with that, and print why it is not to be had."""
    sys.stdout.write(enter())


def listen() -> socket.socket:
    """A listener for the launchers, on a port of this network that is free."""
    return socket.create_server((ADDRESS, 0), backlog=128)


def reserve_port() -> socket.socket:
    """A port that nobody else is given while the socket is held, and that the code inside can still listen on.

    Bound with SO_REUSEADDR but not listening: the kernel hands it to nobody, and lets one listener with that option in.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder
