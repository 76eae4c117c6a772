"""The usage of the node's GPUs, from NVIDIA's management library (NVML) if it is installed.

Another thread reads the driver, which may hang. Callers get the values of the last reading.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

LIBRARY = "libnvidia-ml.so.1"
_INTERVAL_SECONDS = 2.0
"""Interval between two readings: the shortest interval of samples."""
_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU


class Gpu(NamedTuple):
    """One GPU's usage: per cent, bytes, watts, Celsius; None for values that the driver does not report.

    `gpu` is its index in `Gpus`. `memory_utilization` is how much of the time memory was read or written.
    """

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
    """Reads the GPUs with these UUIDs (in a pod, indices) repeatedly, and numbers them in this order.

    Call `start` first. `readings` is empty until the first reading. `library` replaces NVML in tests.
    """

    def __init__(self, uuids: Sequence[str], library: Any = None) -> None:
        self._uuids = list(uuids)
        self._library = library
        self._is_stopped = threading.Event()
        self.readings: List[Gpu] = []

    def start(self) -> None:
        """Read the GPUs every two seconds from now on."""
        if self._uuids:
            threading.Thread(target=self._read_repeatedly, name="gpus", daemon=True).start()

    def _read_repeatedly(self) -> None:
        handles = self.open_handles()
        while handles:  # without any GPU, the thread ends at once
            self.readings = [self.read_gpu(index, handle) for index, handle in handles.items()]
            if self._is_stopped.wait(_INTERVAL_SECONDS):
                return

    def stop(self) -> None:
        """Stop reading."""
        self._is_stopped.set()

    def open_handles(self) -> Dict[int, Any]:
        """Return the handles of the GPUs that the driver finds, by index; none without the library or a driver."""
        handles = {}
        # Every function of NVML returns 0 on success, else an error code.
        try:
            if self._library is None:
                self._library = ctypes.CDLL(LIBRARY)
            if self._library.nvmlInit_v2():
                return {}
            for index, uuid in enumerate(self._uuids):
                handle = ctypes.c_void_p()
                pointer = ctypes.byref(handle)
                if uuid.isdigit():
                    error_code = self._library.nvmlDeviceGetHandleByIndex_v2(int(uuid), pointer)
                else:
                    error_code = self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), pointer)
                if not error_code:
                    handles[index] = handle
        except (OSError, AttributeError):
            return {}
        return handles

    def read_gpu(self, index: int, handle: Any) -> Gpu:
        """Read one GPU's usage."""
        utilization, memory = _Utilization(), _Memory()
        power, temperature = ctypes.c_uint(), ctypes.c_uint()
        library = self._library
        has_utilization = not library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilization))
        has_memory = not library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        has_power = not library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power))
        has_temperature = not library.nvmlDeviceGetTemperature(handle, _GPU_SENSOR, ctypes.byref(temperature))
        return Gpu(
            index,
            int(utilization.gpu) if has_utilization else None,
            int(utilization.memory) if has_utilization else None,
            int(memory.used) if has_memory else None,
            int(memory.total) if has_memory else None,
            power.value / 1000.0 if has_power else None,  # NVML reports milliwatts
            int(temperature.value) if has_temperature else None,
        )
