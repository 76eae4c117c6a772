"""GPUs through a library of the test's own that speaks as NVML does."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

from runtime.launcher.gpus import Gpu, Gpus

OK, NOT_SUPPORTED = 0, 3


class Library:
    """Two GPUs, of which the second does not tell its power. Structures are filled as C would: through a pointer."""

    def __init__(self) -> None:
        self.uuids = [b"GPU-a", b"GPU-b"]
        self.entered = threading.Event()
        self.stuck = threading.Event()
        self.stuck.set()

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's name
        return OK

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802 - NVML's name
        if uuid not in self.uuids:
            return NOT_SUPPORTED
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = 16 + self.uuids.index(uuid)
        return OK

    def nvmlDeviceGetUtilizationRates(self, handle: Any, filled: Any) -> int:  # noqa: N802 - NVML's name
        self.entered.set()
        self.stuck.wait(30)
        numbers = ctypes.cast(filled, ctypes.POINTER(ctypes.c_uint))
        numbers[0], numbers[1] = 90, 40
        return OK

    def nvmlDeviceGetMemoryInfo(self, handle: Any, filled: Any) -> int:  # noqa: N802 - NVML's name
        numbers = ctypes.cast(filled, ctypes.POINTER(ctypes.c_ulonglong))
        numbers[0], numbers[1], numbers[2] = 80 << 30, 60 << 30, 20 << 30
        return OK

    def nvmlDeviceGetPowerUsage(self, handle: Any, filled: Any) -> int:  # noqa: N802 - NVML's name
        if handle.value == 17:
            return NOT_SUPPORTED
        ctypes.cast(filled, ctypes.POINTER(ctypes.c_uint))[0] = 312500
        return OK

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, filled: Any) -> int:  # noqa: N802 - NVML's name
        assert sensor == 0
        ctypes.cast(filled, ctypes.POINTER(ctypes.c_uint))[0] = 61
        return OK


def until_seen(gpus: Gpus) -> list[Gpu]:
    give_up_at = time.monotonic() + 20
    while not gpus.seen and time.monotonic() < give_up_at:
        threading.Event().wait(0.01)
    return gpus.seen


def test_what_each_gpu_does() -> None:
    gpus = Gpus(["GPU-a", "GPU-b"], Library())
    gpus.watch()
    assert until_seen(gpus) == [
        Gpu(0, 90, 40, 20 << 30, 80 << 30, 312.5, 61),
        Gpu(1, 90, 40, 20 << 30, 80 << 30, None, 61),
    ]
    gpus.stop()


def test_a_gpu_that_is_not_known_is_left_out() -> None:
    gpus = Gpus(["GPU-x", "GPU-b"], Library())
    assert [handle.value for handle in gpus.open()] == [17]


def test_without_a_library_there_is_nothing_to_see() -> None:
    assert Gpus(["GPU-a"]).open() == []
    none = Gpus([])
    none.watch()
    assert none.seen == []


def test_a_driver_that_hangs_stops_nobody_else() -> None:
    library = Library()
    library.stuck.clear()
    gpus = Gpus(["GPU-a"], library)
    gpus.watch()
    assert library.entered.wait(20)
    assert gpus.seen == []
    gpus.stop()
    library.stuck.set()
