"""Copied into an image whose torch has no CUDA: declares two operators just before torchvision is imported.

torchvision's wheel is built for CUDA; beside a CPU torch its own library does not load, and the Python part then fails on
operators that nobody declared. The one rule: nothing is imported at an interpreter's start (a `.pth` file imports this).
"""

import sys


class _BeforeTorchvision:
    """A finder that finds nothing: it hears the name `torchvision`, does its work, and leaves."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(cls)  # type: ignore[arg-type]
        import torch  # noqa: PLC0415 - the purpose: torch is imported only when torchvision is

        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        # The declaration lasts as long as the library object.
        cls.library = library  # type: ignore[attr-defined]


sys.meta_path.insert(0, _BeforeTorchvision)  # type: ignore[arg-type]
