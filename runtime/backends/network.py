"""A private network namespace for each run, with a loopback interface only, where the kernel allows it.

A process that calls `enter` moves into the namespace, and its later children start there. The namespace has no name and
no mount, so it disappears with its last process. Standard library only: the warm pool's starter imports this.
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
"""The address of every node of a run on one machine."""
INTERFACE = "lo"
"""The network interface that has this address."""
# From <sched.h>, <linux/sockios.h> and <linux/if.h> (IFF_UP | IFF_RUNNING).
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_SIOCSIFADDR = 0x8916
_SIOCBRADDBR = 0x89A0
_UP_AND_RUNNING = 0x1 | 0x40
_unshare = ctypes.CDLL(None, use_errno=True).unshare
"""unshare(2), which returns 0 on success. Python has `os.unshare` only from 3.12 on."""
_BRIDGE = "mpi0"
"""The name of the interface that `add_bridge` adds."""
_BRIDGE_ADDRESS = "169.254.77.1"
"""The address of that interface. Any address that is not a loopback address would do; this one is link-local, and no
other namespace sees it."""


def enter() -> str:
    """Move this process into a new network namespace; return "", or an English sentence that says why that failed.

    An unprivileged user needs a new user namespace as well. It maps only this user, and gives rights only over the new
    network namespace. The kernel creates a user namespace only for a process with a single thread (unshare(2)).
    """
    # Succeeds for root, which needs no user namespace.
    if not _unshare(_CLONE_NEWNET):
        _set_interface_up(INTERFACE)
        return ""
    # The unshare cannot be undone if a later step fails, so a child tries all steps first.
    child = os.fork()
    if not child:
        try:
            _enter_as_user()
        except OSError as error:
            os._exit(error.errno or errno.EPERM)  # the exit code carries the errno to the parent
        os._exit(0)
    error_number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if error_number:
        return f"The kernel refuses a network namespace: {os.strerror(error_number)}."
    _enter_as_user()
    return ""


def add_bridge() -> str:
    """Add an interface that leads nowhere; return "", or an English sentence that says why the kernel refuses.

    Runs with MPI need it: Open MPI's daemons never connect to each other by a loopback address, even if they have no
    other address.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _SIOCBRADDBR, _BRIDGE.encode() + b"\0")
            # struct ifreq: the name, then a sockaddr_in (family, port, address, padding).
            address = struct.pack("16sHH4s8x", _BRIDGE.encode(), socket.AF_INET, 0, socket.inet_aton(_BRIDGE_ADDRESS))
            fcntl.ioctl(control, _SIOCSIFADDR, address)
        _set_interface_up(_BRIDGE)
    except OSError as error:
        return f"The kernel refuses a network bridge: {error.strerror}."
    return ""


def _enter_as_user() -> None:
    """Enter a new user namespace and a network namespace in it. Raises OSError."""
    user, group = os.geteuid(), os.getegid()
    if _unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no namespaces")
    # An unprivileged process may write its gid_map only after it has given up setgroups(2); see user_namespaces(7).
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _set_interface_up(INTERFACE)


def _set_interface_up(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        # struct ifreq: the name, then the flags and padding.
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", interface.encode(), _UP_AND_RUNNING))


def main() -> None:
    """Try to enter a network namespace and print why that is impossible; print nothing on success.

    The entry point of a short-lived process that `warm_pool.client.network_gap` starts.
    """
    sys.stdout.write(enter())


def listen(address: str = ADDRESS) -> socket.socket:
    """Return a listening socket on a free port, at which node 0's launcher accepts the other launchers."""
    return socket.create_server((address, 0), backlog=128)  # all launchers of a run may connect at once


def reserve_port() -> socket.socket:
    """Reserve a free port for the run's code: no other process gets it while the returned socket is open.

    The socket is bound with SO_REUSEADDR but does not listen, so a listener with the same option can still bind the
    port.
    """
    # Port 0 makes the kernel choose a free port. It is bound on all addresses, because the code may use any of them.
    reserved_socket = socket.socket()
    reserved_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved_socket.bind(("", 0))
    return reserved_socket
