"""Run a script that takes GPUs for granted, unchanged, on nodes that have none: `with_cpu.py SCRIPT ...`.

A device that the script names by its number becomes the CPU, and NCCL becomes gloo. All else stays as it is.
"""

import runpy
import sys

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel


def to_cpu(move):
    """Return a module's or tensor's `to` for which a number is the CPU."""
    return lambda self, device, *rest, **options: move(
        self, "cpu" if isinstance(device, int) else device, *rest, **options
    )


def without_devices(prepare):
    """Return DDP's `__init__` that ignores devices: its module is on the CPU."""
    return lambda self, module, device_ids=None, output_device=None, **options: prepare(self, module, **options)


load, init = torch.load, torch.distributed.init_process_group
torch.load = lambda file, map_location=None, **options: load(file, map_location="cpu", **options)
torch.nn.Module.to = to_cpu(torch.nn.Module.to)
torch.Tensor.to = to_cpu(torch.Tensor.to)
DistributedDataParallel.__init__ = without_devices(DistributedDataParallel.__init__)
torch.distributed.init_process_group = lambda backend=None, *rest, **options: init("gloo", *rest, **options)
torch.cuda.set_device = lambda device: None
del sys.argv[0]  # as if the script had been started itself
runpy.run_path(sys.argv[0], run_name="__main__")
