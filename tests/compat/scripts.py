"""Third-party scripts: where each comes from, how it is started, and what it must print.

They are not part of this repository. The tests install those of published packages. The others are fetched from their
own repositories at a fixed commit:

    python -m tests.compat.scripts            # into var/compat, once; needs the internet

A script runs byte for byte as its authors published it. What it needs besides is named here.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

FETCHED = Path(__file__).resolve().parents[2] / "var" / "compat"
RAW = "https://raw.githubusercontent.com"
WRITEFILE = "%%writefile "
BOTH_SHAPES = ((1, 2), (2, 1))
"""Pairs of nodes and processes on each node, for scripts that use their local rank."""
LICENCES = {
    "cybertronai/pytorch-aws": "none stated",
    "horovod/horovod": "Apache-2.0",
    "jeffra/deepspeed-kdd20": "none stated",
    "kubeflow/training-operator": "Apache-2.0",
    "pytorch/elastic": "BSD-3-Clause",
    "pytorch/examples": "BSD-3-Clause",
    "tensorflow/docs": "Apache-2.0",
}
SERIES = "distributed/ddp-tutorial-series"
DIGITS = ("--data-dir", "/datasets/digits", "--epochs", "6")
LEARNED = r"Test set: Average loss: \d\.\d+, Accuracy: (?:[3-9]\d|100)\.\d+%"
"""An accuracy of at least 30 %, where guessing gives 10 %."""


class Foreign(NamedTuple):
    """A script of another repository.

    `files` are paths in the repository. A notebook stands for the files that its `%%writefile` cells write. `wrapper`
    is a script of ours that starts the first of these files. `output` is a pattern of what rank 0 must print.
    `node_output` is one of what the first rank of each node prints and no other does. `{rank}` and `{world_size}` in
    both are replaced.
    """

    name: str
    repository: str
    commit: str
    files: tuple[str, ...]
    output: str
    node_output: str = ""
    wrapper: str = ""
    arguments: tuple[str, ...] = ()
    framework: str = "pytorch"
    image: str = ""
    """If empty, the image of the framework."""
    needs_gpu: bool = False
    shapes: tuple[tuple[int, int], ...] = ((2, 1),)
    """The nodes, and processes on each, with which the script is run."""

    @property
    def script(self):
        """The script that a run starts."""
        return self.wrapper or Path(self.files[0]).name

    @property
    def folder(self):
        """Where it is once it is fetched."""
        return FETCHED / self.name


SCRIPTS = (
    Foreign(
        "torchelastic-echo", "pytorch/elastic", "7888608c2105e17bd8c11ef8af1d4f06e72f12a0",
        ("examples/multi_container/echo.py",),
        output=r"after init process group, rank=0, world_size = {world_size}",
    ),
    Foreign(
        "kubeflow-demo", "kubeflow/training-operator", "b938905dea0eeb83553b47c04cbd04f3cef57bbd",
        ("examples/pytorch/cpu-demo/demo.py",),
        output=r"rank 0 world_size {world_size} result tensor\(\[{world_size}\]\)",
    ),
    Foreign(
        "kubeflow-sendrecv", "kubeflow/training-operator", "05d24a7c9d1aaa35dc42642b6f9fe38e7d5b15ec",
        ("examples/pytorch/smoke-dist/dist_sendrecv.py",),
        output=r"Result from worker 1 : tensor",
    ),
    Foreign(
        "deepspeed-kdd20", "jeffra/deepspeed-kdd20", "02a2069f5b2d401dfb284b463b7eb724442d77f3",
        ("test.py",),
        # Its parser knows only the spelling `--local_rank`. Without that argument the script prints -1.
        output=r"hello from local rank: 0$",
        node_output=r"hello from local rank: 0$",
        shapes=BOTH_SHAPES,
    ),
    Foreign(
        "cybertron-mnist", "cybertronai/pytorch-aws", "068a87c769fdb47efb36b07c2636ccd2ee8cff3d",
        ("mnist_distributed.py",),
        wrapper="with_links.py",  # the script always reads its data from /tmp/data
        arguments=(
            "/tmp/data=/datasets/digits", "mnist_distributed.py", "--mode=worker", "--epochs", "2", "--lr", "0.03",
        ),
        output=r"Test set: Average loss: \d\.\d+, Accuracy: \d+/360 \((?:[5-9]\d|100)%\)",
        node_output=r"DDP: process {rank}/{world_size}",  # printed where `--local_rank` is 0
        shapes=BOTH_SHAPES,
    ),
    Foreign(
        "kubeflow-imagenet", "kubeflow/training-operator", "05d24a7c9d1aaa35dc42642b6f9fe38e7d5b15ec",
        ("examples/pytorch/elastic/imagenet/imagenet.py",),
        arguments=("--arch", "squeezenet1_1", "--epochs", "2", "--batch-size", "4", "/datasets/digits/images"),
        output=r"saved checkpoint for epoch 1 at /tmp/checkpoint\.pth\.tar",
    ),
    Foreign(
        "pytorch-ddp-series", "pytorch/examples", "17f4f9a5d66c6da5b348d032cd6a6e2410760952",
        (f"{SERIES}/multinode.py", f"{SERIES}/datautils.py"),
        arguments=("4", "2"),  # 4 epochs, with a snapshot in every second one
        output=r"Epoch 2 \| Training snapshot saved at snapshot\.pt",
        needs_gpu=True,
    ),
    Foreign(
        "pytorch-ddp-series-on-cpu", "pytorch/examples", "17f4f9a5d66c6da5b348d032cd6a6e2410760952",
        (f"{SERIES}/multinode.py", f"{SERIES}/datautils.py"),
        wrapper="with_cpu.py",
        arguments=("multinode.py", "4", "2"),
        output=r"Epoch 2 \| Training snapshot saved at snapshot\.pt",
        shapes=((1, 2),),  # test_the_ddp_tutorial_continues_from_its_snapshot runs it on two nodes
    ),
    Foreign(
        "pytorch-ddp-torchrun-on-cpu", "pytorch/examples", "f62b4aec7bff832fc65b59aa62d60e94ddd6b39e",
        (f"{SERIES}/multigpu_torchrun.py", f"{SERIES}/datautils.py"),
        wrapper="with_cpu.py",
        arguments=("multigpu_torchrun.py", "4", "2"),
        output=r"\[GPU0\] Epoch 3 \| Batchsize: 32 \| Steps: 32",
        node_output=r"Epoch 2 \| Training snapshot saved at snapshot\.pt",  # saved where the local rank is 0
        shapes=BOTH_SHAPES,
    ),
    Foreign(
        "horovod-mnist", "horovod/horovod", "034964ac5456b5484f156cc1a37655f349c13a37",
        ("examples/pytorch/pytorch_mnist.py",),
        framework="horovod", arguments=DIGITS, output=LEARNED,
    ),
    Foreign(
        "horovod-elastic-mnist", "horovod/horovod", "7a139516efd094c3f426528d65b4f35fb7072486",
        ("examples/elastic/pytorch/pytorch_mnist_elastic.py",),
        framework="horovod", arguments=DIGITS, output=LEARNED,
    ),
    Foreign(
        "horovod-tensorflow2-synthetic-benchmark", "horovod/horovod", "1d217b59949986d025f6db93c49943fb6b6cc78f",
        ("examples/tensorflow2/tensorflow2_synthetic_benchmark.py",),
        framework="horovod", image="horovod-tensorflow",
        arguments=(
            "--no-cuda", "--model", "MobileNet", "--batch-size", "2", "--num-warmup-batches", "1",
            "--num-batches-per-iter", "1", "--num-iters", "1",
        ),
        output=r"Total img/sec on 2 CPU\(s\): \d+\.\d",
    ),
    Foreign(
        "tensorflow-ctl", "tensorflow/docs", "0b5a2b246bea0d86bda35a83b91399fa96a6ff49",
        ("site/en/tutorials/distribute/multi_worker_with_ctl.ipynb",),
        framework="tensorflow", wrapper="with_legacy_keras.py", arguments=("main.py",),
        output=r"Epoch: 2, accuracy: 0\.[6-9]\d+, train_loss: 0\.\d+\.",
    ),
)  # fmt: skip


def fetch(foreign):
    """Fetch a script's files from its repository, all or none of them."""
    files = {}
    for path in foreign.files:
        address = f"{RAW}/{foreign.repository}/{foreign.commit}/{path}"
        with urllib.request.urlopen(address, timeout=60) as answer:
            content = answer.read()
        files.update(files_of_notebook(content) if path.endswith(".ipynb") else {Path(path).name: content})
    foreign.folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (foreign.folder / name).write_bytes(content)


def files_of_notebook(notebook):
    """Return the files that a notebook's `%%writefile` cells write, by name, as Jupyter would write them."""
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
        sys.stdout.write(f"{one.name}: {one.repository} ({LICENCES[one.repository]}) -> {one.folder}\n")
