"""Sockets, signals and waiting without `socket`, `signal`, `selectors` and `ctypes`. The rule is that of `plain`."""

from __future__ import annotations

import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from selectors import DefaultSelector as Selector
    from socket import CMSG_SPACE, SCM_RIGHTS, SOL_SOCKET, socket
    from typing import Any, Dict, List, Optional, Tuple
else:
    try:
        import _signal as signal
        from _socket import CMSG_SPACE, SCM_RIGHTS, SOL_SOCKET, socket
    except ImportError:
        import signal
        from socket import CMSG_SPACE, SCM_RIGHTS, SOL_SOCKET, socket

__all__ = ["CMSG_SPACE", "EVENT_READ", "SCM_RIGHTS", "SOL_SOCKET", "Selector", "hide", "signal", "socket"]

EVENT_READ = 1
"""As in `selectors`."""
_PR_SET_DUMPABLE = 4


class _Key:
    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data


class _Selector:
    """For reading alone."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._keys: Dict[int, _Key] = {}

    def register(self, file: Any, _events: int, data: Any = None) -> None:
        """Wait for this one too. Raises KeyError where it is waited for already."""
        descriptor = _descriptor(file)
        if descriptor in self._keys:
            raise KeyError(descriptor)
        self._poll.register(descriptor, select.POLLIN)
        self._keys[descriptor] = _Key(data)

    def unregister(self, file: Any) -> None:
        """Wait for it no more; to be called before it is closed. Raises KeyError."""
        descriptor = _descriptor(file)
        del self._keys[descriptor]
        self._poll.unregister(descriptor)

    def select(self, timeout: Optional[float] = None) -> List[Tuple[_Key, int]]:
        """The ones that can be read, after `timeout` seconds at the latest; those that broke among them."""
        milliseconds = None if timeout is None else -int(-max(0.0, timeout) * 1000 // 1)
        ready = self._poll.poll(milliseconds)
        return [(self._keys[descriptor], EVENT_READ) for descriptor, _state in ready]


def _descriptor(file: Any) -> int:
    return file if isinstance(file, int) else int(file.fileno())


if not TYPE_CHECKING:
    Selector = _Selector


def hide() -> None:
    """Make this process non-dumpable: others of the same user may not open its descriptors, memory or environment."""
    try:
        import _ctypes  # noqa: PLC0415 - as is the other below: where this one is not to be had

        library: Any = _ctypes
        library.call_function(library.dlsym(library.dlopen(None, 0), "prctl"), (_PR_SET_DUMPABLE, 0, 0, 0, 0))
    except (ImportError, AttributeError, OSError, TypeError):
        import ctypes  # noqa: PLC0415

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
