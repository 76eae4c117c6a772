"""The node's GPUs, by NVIDIA's management library (NVML) where there is one.

The one rule: a driver that hangs stops nothing but the thread that asks it; who wants to know gets what was seen last.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, List, NamedTuple, Optional, Sequence

LIBRARY = "libnvidia-ml.so.1"
_SECONDS = 2.0
_BOARD_SENSOR = 0


class Gpu(NamedTuple):
    """One GPU at one moment: per cent, bytes, watts, Celsius; None for what the driver does not tell."""

    gpu: int
    utilization: Optional[int]
    memory_utilization: Optional[int]
    memory: Optional[int]
    memory_total: Optional[int]
    power: Optional[float]
    temperature: Optional[int]


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Gpus:
    """The GPUs with these UUIDs (in a pod, which sees no others: numbers), numbered in this order.

    `watch` begins; `seen` is empty until they have been asked.
    """

    def __init__(self, uuids: Sequence[str], library: Any = None) -> None:
        self._uuids = list(uuids)
        self._library = library
        self._over = threading.Event()
        self.seen: List[Gpu] = []

    def watch(self) -> None:
        """Ask every two seconds from now on."""
        if self._uuids:
            threading.Thread(target=self._ask_on, name="gpus", daemon=True).start()

    def _ask_on(self) -> None:
        handles = self.open()
        while handles:
            self.seen = [self.ask(number, handle) for number, handle in enumerate(handles)]
            if self._over.wait(_SECONDS):
                return

    def stop(self) -> None:
        """Ask no more."""
        self._over.set()

    def open(self) -> List[Any]:
        """A handle for each GPU; none where there is no library, or no driver that answers it."""
        handles = []
        try:
            if self._library is None:
                self._library = ctypes.CDLL(LIBRARY)
            if self._library.nvmlInit_v2():
                return []
            for uuid in self._uuids:
                handle = ctypes.c_void_p()
                found = ctypes.byref(handle)
                if uuid.isdigit():
                    missing = self._library.nvmlDeviceGetHandleByIndex_v2(int(uuid), found)
                else:
                    missing = self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), found)
                if not missing:
                    handles.append(handle)
        except (OSError, AttributeError):
            return []
        return handles

    def ask(self, number: int, handle: Any) -> Gpu:
        """What one GPU does now."""
        utilization, memory = _Utilization(), _Memory()
        power, temperature = ctypes.c_uint(), ctypes.c_uint()
        library = self._library
        used = not library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilization))
        filled = not library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        powered = not library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power))
        warm = not library.nvmlDeviceGetTemperature(handle, _BOARD_SENSOR, ctypes.byref(temperature))
        return Gpu(
            number,
            int(utilization.gpu) if used else None,
            int(utilization.memory) if used else None,
            int(memory.used) if filled else None,
            int(memory.total) if filled else None,
            power.value / 1000.0 if powered else None,
            int(temperature.value) if warm else None,
        )
