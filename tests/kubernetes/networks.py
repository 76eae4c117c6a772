"""The pods' networks: one for each Job, in which every pod has an address of loopback.

The one rule: a process that only waits holds a network, as the pause container does; it ends with the cluster.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.resources import Object

_PAUSE = """
import os, signal
from runtime.backends.network import enter
os.write(1, (enter() or "ready").encode())
os.close(1)
signal.pause()
"""
_HOUSE = Path(__file__).resolve().parents[2]


@dataclass
class Networks:
    """The pods' networks: one for each Job, in which every pod has an address of loopback."""

    _pauses: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def address(self) -> str:
        """A pod's IP."""
        number = next(self._numbers)
        return f"127.77.{number // 250}.{number % 250 + 1}"

    def of(self, pod: Object) -> str:
        """The network namespace of the pod's Job; empty where the kernel gives none."""
        owner = next((one["uid"] for one in pod["metadata"].get("ownerReferences", [])), pod["metadata"]["uid"])
        with self._lock:
            if owner not in self._pauses:
                made = subprocess.Popen([sys.executable, "-c", _PAUSE], cwd=_HOUSE, stdout=subprocess.PIPE)
                assert made.stdout is not None
                told = made.stdout.read()
                made.stdout.close()
                self._pauses[owner] = made
                if told != b"ready":
                    made.kill()
            pause = self._pauses[owner]
        return f"/proc/{pause.pid}/ns/net" if pause.poll() is None else ""

    def close(self) -> None:
        """End them."""
        for pause in self._pauses.values():
            pause.kill()
            pause.wait()
