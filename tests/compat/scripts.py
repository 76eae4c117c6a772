"""Scripts that we did not write: where each comes from, what it is given, and what it must say.

They are not part of this repository. Those of published packages are installed by the tests; the others are fetched by
whoever wants to run them, from their own repositories at a fixed commit:

    python -m tests.compat.scripts            # into var/compat, once; needs the internet

The one rule: a script runs byte for byte as its authors published it. What it needs besides is named here.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

HOUSE = Path(__file__).resolve().parents[2]
FETCHED = HOUSE / "var" / "compat"
RAW = "https://raw.githubusercontent.com"
WRITEFILE = "%%writefile "
SHAPES = ((1, 2), (2, 1))
"""Nodes, and processes on each."""


class Foreign(NamedTuple):
    """A script of somebody else's repository.

    `files` are paths in the repository; of a notebook, the files that its `%%writefile` cells write. `beside` are files
    of ours that go into the workspace with it. `says` is a pattern of what rank 0 must print, `nodes_say` of what the
    first rank of each node prints and no other does.
    """

    name: str
    repository: str
    commit: str
    files: tuple[str, ...]
    licence: str
    framework: str
    script: str
    says: str
    nodes_say: str = ""
    arguments: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    needs_gpu: bool = False
    shapes: tuple[tuple[int, int], ...] = SHAPES

    @property
    def folder(self) -> Path:
        """Where it lies once it is fetched."""
        return FETCHED / self.name


SCRIPTS = (
    Foreign(
        name="torchelastic-echo",
        repository="pytorch/elastic",
        commit="7888608c2105e17bd8c11ef8af1d4f06e72f12a0",
        files=("examples/multi_container/echo.py",),
        licence="BSD-3-Clause",
        framework="pytorch",
        script="echo.py",
        says=r"after init process group, rank=0, world_size = {world_size}",
    ),
    Foreign(
        name="kubeflow-demo",
        repository="kubeflow/training-operator",
        commit="b938905dea0eeb83553b47c04cbd04f3cef57bbd",
        files=("examples/pytorch/cpu-demo/demo.py",),
        licence="Apache-2.0",
        framework="pytorch",
        script="demo.py",
        says=r"rank 0 world_size {world_size} result tensor\(\[{world_size}\]\)",
    ),
    Foreign(
        name="kubeflow-sendrecv",
        repository="kubeflow/training-operator",
        commit="05d24a7c9d1aaa35dc42642b6f9fe38e7d5b15ec",
        files=("examples/pytorch/smoke-dist/dist_sendrecv.py",),
        licence="Apache-2.0",
        framework="pytorch",
        script="dist_sendrecv.py",
        says=r"Result from worker 1 : tensor",
    ),
    Foreign(
        name="deepspeed-kdd20",
        repository="jeffra/deepspeed-kdd20",
        commit="02a2069f5b2d401dfb284b463b7eb724442d77f3",
        files=("test.py",),
        licence="none stated",
        framework="pytorch",
        script="test.py",
        # Its parser takes `--local_rank` and nothing else; -1 is what it says when it was not given.
        says=r"hello from local rank: 0$",
        nodes_say=r"hello from local rank: 0$",
    ),
    Foreign(
        name="cybertron-mnist",
        repository="cybertronai/pytorch-aws",
        commit="068a87c769fdb47efb36b07c2636ccd2ee8cff3d",
        files=("mnist_distributed.py",),
        licence="none stated",
        framework="pytorch",
        script="with_links.py",
        # Its data are in /tmp/data, downloaded or not.
        arguments=(
            "/tmp/data=/datasets/digits",
            "mnist_distributed.py",
            "--mode=worker",
            "--epochs",
            "2",
            "--lr",
            "0.03",
        ),
        beside=("with_links.py",),
        says=r"Test set: Average loss: \d\.\d+, Accuracy: \d+/360 \((?:[5-9]\d|100)%\)",
        # Said where `--local_rank` is 0, which is what it says when it was not given.
        nodes_say=r"DDP: process {rank}/{world_size}",
    ),
    Foreign(
        name="kubeflow-imagenet",
        repository="kubeflow/training-operator",
        commit="05d24a7c9d1aaa35dc42642b6f9fe38e7d5b15ec",
        files=("examples/pytorch/elastic/imagenet/imagenet.py",),
        licence="Apache-2.0",
        framework="pytorch",
        script="imagenet.py",
        arguments=("--arch", "squeezenet1_1", "--epochs", "2", "--batch-size", "4", "/datasets/digits/images"),
        says=r"saved checkpoint for epoch 1 at /tmp/checkpoint\.pth\.tar",
        # Its ranks of one node race for one file, whoever starts them.
        shapes=((2, 1),),
    ),
    Foreign(
        name="pytorch-ddp-series",
        repository="pytorch/examples",
        commit="17f4f9a5d66c6da5b348d032cd6a6e2410760952",
        files=("distributed/ddp-tutorial-series/multinode.py", "distributed/ddp-tutorial-series/datautils.py"),
        licence="BSD-3-Clause",
        framework="pytorch",
        script="multinode.py",
        arguments=("4", "2"),
        says=r"Epoch 2 \| Training snapshot saved at snapshot\.pt",
        needs_gpu=True,
    ),
    Foreign(
        name="pytorch-ddp-series-on-cpu",
        repository="pytorch/examples",
        commit="17f4f9a5d66c6da5b348d032cd6a6e2410760952",
        files=("distributed/ddp-tutorial-series/multinode.py", "distributed/ddp-tutorial-series/datautils.py"),
        licence="BSD-3-Clause",
        framework="pytorch",
        script="with_cpu.py",
        arguments=("multinode.py", "4", "2"),
        beside=("with_cpu.py",),
        says=r"Epoch 2 \| Training snapshot saved at snapshot\.pt",
    ),
    Foreign(
        name="pytorch-ddp-torchrun-on-cpu",
        repository="pytorch/examples",
        commit="f62b4aec7bff832fc65b59aa62d60e94ddd6b39e",
        files=("distributed/ddp-tutorial-series/multigpu_torchrun.py", "distributed/ddp-tutorial-series/datautils.py"),
        licence="BSD-3-Clause",
        framework="pytorch",
        script="with_cpu.py",
        arguments=("multigpu_torchrun.py", "4", "2"),
        beside=("with_cpu.py",),
        says=r"\[GPU0\] Epoch 3 \| Batchsize: 32 \| Steps: 32",
        nodes_say=r"Epoch 2 \| Training snapshot saved at snapshot\.pt",
    ),
    Foreign(
        name="horovod-mnist",
        repository="horovod/horovod",
        commit="034964ac5456b5484f156cc1a37655f349c13a37",
        files=("examples/pytorch/pytorch_mnist.py",),
        licence="Apache-2.0",
        framework="horovod",
        script="pytorch_mnist.py",
        arguments=("--data-dir", "/datasets/digits", "--epochs", "6"),
        says=r"Test set: Average loss: \d\.\d+, Accuracy: (?:[3-9]\d|100)\.\d+%",
    ),
    Foreign(
        name="horovod-elastic-mnist",
        repository="horovod/horovod",
        commit="7a139516efd094c3f426528d65b4f35fb7072486",
        files=("examples/elastic/pytorch/pytorch_mnist_elastic.py",),
        licence="Apache-2.0",
        framework="horovod",
        script="pytorch_mnist_elastic.py",
        arguments=("--data-dir", "/datasets/digits", "--epochs", "6"),
        says=r"Test set: Average loss: \d\.\d+, Accuracy: (?:[3-9]\d|100)\.\d+%",
    ),
    Foreign(
        name="tensorflow-ctl",
        repository="tensorflow/docs",
        commit="0b5a2b246bea0d86bda35a83b91399fa96a6ff49",
        files=("site/en/tutorials/distribute/multi_worker_with_ctl.ipynb",),
        licence="Apache-2.0",
        framework="tensorflow",
        script="with_legacy_keras.py",
        arguments=("main.py",),
        beside=("with_legacy_keras.py",),
        says=r"Epoch: 2, accuracy: 0\.[6-9]\d+, train_loss: 0\.\d+\.",
    ),
)


def fetch(foreign: Foreign) -> None:
    """Bring one script's files from its repository, all or none of them."""
    made = {}
    for path in foreign.files:
        address = f"{RAW}/{foreign.repository}/{foreign.commit}/{path}"
        with urllib.request.urlopen(address, timeout=60) as answer:
            content: bytes = answer.read()
        made.update(written_by(content) if path.endswith(".ipynb") else {Path(path).name: content})
    foreign.folder.mkdir(parents=True, exist_ok=True)
    for name, content in made.items():
        (foreign.folder / name).write_bytes(content)


def written_by(notebook: bytes) -> dict[str, bytes]:
    """The files that a notebook's `%%writefile` cells write: name and content, as Jupyter would write them."""
    files = {}
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and source.startswith(WRITEFILE):
            first, _, rest = source.partition("\n")
            files[first.removeprefix(WRITEFILE).strip()] = (rest if rest.endswith("\n") else rest + "\n").encode()
    return files


if __name__ == "__main__":
    for one in SCRIPTS:
        fetch(one)
        sys.stdout.write(f"{one.name}: {one.repository} ({one.licence}) -> {one.folder}\n")
