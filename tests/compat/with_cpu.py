"""Run a script that takes GPUs for granted, unchanged, on nodes that have none: `with_cpu.py SCRIPT ...`.

A device that is named by its number is the CPU, and NCCL is gloo. Everything else is as the script has it.
"""

import runpy
import sys

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel


def to_cpu(move):
    """A module's or tensor's `to`, for which a number is the CPU."""

    def moved(self, device, *rest, **options):
        return move(self, "cpu" if isinstance(device, int) else device, *rest, **options)

    return moved


def without_devices(prepare):
    """DDP's `__init__`, told of no devices: its module is on the CPU."""

    def prepared(self, module, device_ids=None, output_device=None, **options):
        prepare(self, module, **options)

    return prepared


def over_gloo(init):
    """`init_process_group`, whatever backend it is asked for."""

    def initialized(backend=None, *rest, **options):
        init("gloo", *rest, **options)

    return initialized


def onto_cpu(load):
    """Return a `torch.load` that maps all storages to the CPU and ignores the script's own mapping."""

    def loaded(file, map_location=None, **options):
        return load(file, map_location="cpu", **options)

    return loaded


torch.load = onto_cpu(torch.load)
torch.nn.Module.to = to_cpu(torch.nn.Module.to)
torch.Tensor.to = to_cpu(torch.Tensor.to)
DistributedDataParallel.__init__ = without_devices(DistributedDataParallel.__init__)
torch.distributed.init_process_group = over_gloo(torch.distributed.init_process_group)
torch.cuda.set_device = lambda device: None
del sys.argv[0]  # as if the script had been started itself
runpy.run_path(sys.argv[0], run_name="__main__")
