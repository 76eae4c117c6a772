"""Copied into an image whose torch has no CUDA: declares two operators just before torchvision is imported.

torchvision's wheel is built for CUDA; beside a CPU torch its own library does not load, and the Python part then fails
on operators that nobody declared. The one rule: nothing is imported at an interpreter's start (a `.pth` imports this).
"""

import sys


class BeforeTorchvision:
    """A finder that finds nothing: it hears the name `torchvision`, does its work, and leaves."""

    declared = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Declare the operators where it is torchvision's turn; never find anything."""
        if name != "torchvision":
            return
        sys.meta_path.remove(cls)
        # Not at the top of the file: an interpreter that never imports torchvision does not pay for torch. The
        # declaration lasts as long as this object.
        from torch import library  # noqa: PLC0415 - as said

        cls.declared = library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            cls.declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, BeforeTorchvision)
