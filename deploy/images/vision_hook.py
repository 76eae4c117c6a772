"""A hook for images whose torch has no CUDA: it declares two operators just before torchvision is imported.

torchvision's wheel is built for CUDA. Its compiled library does not load with a CPU build of torch, and then its Python
code fails: even without the library, that code registers functions for the operators `nms` and `qnms`, which nothing
has declared. The image builder copies this file into the image. A `.pth` file imports it at each interpreter's start,
so it must not import anything slow.
"""

import sys


class TorchvisionHook:
    """A meta path finder that waits for the import of `torchvision`. It never finds a module itself."""

    library = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Declare the operators if torchvision is about to be imported; return None, so that other finders go on."""
        if name != "torchvision":
            return
        sys.meta_path.remove(cls)
        # Not at the top of the file: an interpreter that never imports torchvision does not pay for torch.
        from torch import library  # noqa: PLC0415 - see above

        # Kept in the class, because the operators are declared only as long as this object exists.
        cls.library = library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            cls.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, TorchvisionHook)
