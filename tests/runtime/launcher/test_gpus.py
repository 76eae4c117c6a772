"""GPU usage, read through a fake of NVML."""

import ctypes
import threading

import pytest

from runtime.launcher.telemetry.gpus import Gpu, Gpus
from tests.console.processes import wait_for

pytestmark = pytest.mark.rerun_if_late("it waits for a thread that asks the driver")

OK, NOT_SUPPORTED = 0, 3


class Library:
    """NVML with two GPUs; the second does not report its power. As in C, structures are filled through pointers."""

    def __init__(self):
        self.uuids = [b"GPU-a", b"GPU-b"]
        self.entered = threading.Event()
        self.may_respond = threading.Event()
        self.may_respond.set()

    def nvmlInit_v2(self):  # noqa: N802 - NVML's name
        return OK

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802 - NVML's name
        if uuid not in self.uuids:
            return NOT_SUPPORTED
        # The handle of a GPU is 16 more than its index here.
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = 16 + self.uuids.index(uuid)
        return OK

    def nvmlDeviceGetUtilizationRates(self, handle, filled):  # noqa: N802 - NVML's name
        self.entered.set()
        self.may_respond.wait(30)
        numbers = ctypes.cast(filled, ctypes.POINTER(ctypes.c_uint))
        numbers[0], numbers[1] = 90, 40
        return OK

    def nvmlDeviceGetMemoryInfo(self, handle, filled):  # noqa: N802 - NVML's name
        numbers = ctypes.cast(filled, ctypes.POINTER(ctypes.c_ulonglong))
        numbers[0], numbers[1], numbers[2] = 80 << 30, 60 << 30, 20 << 30
        return OK

    def nvmlDeviceGetPowerUsage(self, handle, filled):  # noqa: N802 - NVML's name
        if handle.value == 16 + 1:
            return NOT_SUPPORTED
        ctypes.cast(filled, ctypes.POINTER(ctypes.c_uint))[0] = 312500
        return OK

    def nvmlDeviceGetTemperature(self, handle, sensor, filled):  # noqa: N802 - NVML's name
        assert sensor == 0
        ctypes.cast(filled, ctypes.POINTER(ctypes.c_uint))[0] = 61
        return OK


def test_gpu_usage_is_read_without_waiting_for_the_driver_and_each_gpu_keeps_its_index():
    library = Library()
    library.may_respond.clear()
    gpus = Gpus(["GPU-a", "GPU-unknown", "GPU-b"], library)
    gpus.start()
    assert library.entered.wait(20)
    assert gpus.readings == []
    library.may_respond.set()
    # Per cent of its time and of its memory's, bytes in use and in total, watts, degrees Celsius.
    assert wait_for(lambda: gpus.readings) == [
        Gpu(0, 90, 40, 20 << 30, 80 << 30, 312.5, 61),
        Gpu(2, 90, 40, 20 << 30, 80 << 30, None, 61),
    ]
    gpus.stop()
