"""Diagnose why a run failed, from how it ended and the end of the failing rank's output. Pure.

`CAUSES` is the table of known causes. `diagnose` returns the first cause that matches, the innermost frame of the
customer's own code, and the kind of fix. Customers' code wrote all input and may be hostile. So this module limits
the size of the input, each pattern takes linear time, and quotes are short.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy

from jobs.states import EndReason
from runtime.specs import IMAGE_FAILURES, FailureCode

MAX_LOG_LENGTH = 32 * 1024
"""Characters of the output that are searched, from its end: enough for the tracebacks of several ranks."""
MAX_LINE_LENGTH = 2000
"""Characters of a line that are searched. Only progress bars and minified sources have longer lines."""
MAX_BLOCK_LINES = 60
"""If the output has no traceback, only this many lines at its end are searched. Earlier ones rarely belong to the
failure."""
MAX_VALUE_LENGTH = 160
"""Characters of a value that is quoted from the output: about two lines on the page."""

TRACEBACK = "Traceback (most recent call last):"
RANK_PREFIX = re.compile(r"^\[rank\d{1,6}\]:? ?")
"""The prefix that PyTorch adds to each line of an exception."""
FRAME = re.compile(r'^ *File "([^"]{1,500})", line (\d{1,9})(?:, in (.{1,200}))?$')
"""A frame of a traceback: file, line and function."""
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]{0,200}(?::|$)")
"""The beginning of the line that names an exception, at the end of a traceback."""
LIBRARY = re.compile(r"/site-packages/|/dist-packages/|/lib/python|^<")
"""Files that are not the customer's own: packages, Python's library, and code without a file such as `<string>`. The
same pattern is in `runtime.launcher.rank`, which may import nothing from here."""
CONTROL = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
"""Color codes and other control characters."""


class Fix(enum.StrEnum):
    """The action of the button beside a diagnosis."""

    EDIT = "edit"
    """Open the line of code."""
    REQUIREMENTS = "requirements"
    """Open the requirements file, or the place for a new one."""
    RERUN = "rerun"
    """Open the order form with the job's values, to change one of them."""
    LARGER_NODE = "larger_node"
    """Order the job on the cheapest node type with more memory."""
    SMALLER_BATCH = "smaller_batch"
    """Order the job with half of its batch size."""
    GPU_NODE = "gpu_node"
    """Order the job on the cheapest node type with a GPU."""
    LONGER = "longer"
    """Order the job with a higher time limit."""
    FILES = "files"
    """Look at the job's files."""


@dataclass(frozen=True)
class Evidence:
    """How a run ended. `reason` is an EndReason, `code` a FailureCode, `signal` a name such as SIGKILL.

    If the code raised an exception, the launcher reported its type (`exception`), `message`, `file`, `line` (a number)
    and `function`. `log` is the end of the failing rank's output.
    """

    reason: str
    code: str = ""
    exit_code: int | None = None
    signal: str = ""
    exception: str = ""
    message: str = ""
    file: str = ""
    line: str = ""
    function: str = ""
    log: str = ""


@dataclass(frozen=True)
class Frame:
    """A line of the customer's code: file, number, function ("" at the top level) and source ("" if unknown)."""

    file: str
    line: int
    function: str = ""
    source: str = ""


@dataclass(frozen=True)
class Cause:
    """A known cause of failures.

    It matches a run that ended with one of `reasons`, `codes` or `signals`, or whose output matches one of `patterns`.
    `context` is a further pattern: if it is not empty, a match of `patterns` counts only if the searched lines also
    contain `context`. The named groups of a pattern are the values that `title` and `advice` contain. `compiled` has
    the compiled `patterns`.
    """

    name: str
    title: Promise
    advice: Promise
    fix: Fix = Fix.EDIT
    patterns: tuple[str, ...] = ()
    context: str = ""
    reasons: frozenset[str] = frozenset()
    codes: frozenset[str] = frozenset()
    signals: frozenset[str] = frozenset()
    compiled: tuple[re.Pattern[str], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiled", tuple(re.compile(pattern, re.MULTILINE) for pattern in self.patterns))

    def search(self, text: str) -> re.Match[str] | None:
        """Return the match of the first pattern that the text contains; None if it contains none."""
        for pattern in self.compiled:
            if match := pattern.search(text):
                return match
        return None


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a failure: its name in `CAUSES_BY_NAME`, and the values that its title and advice contain.

    `frame` is the customer's line of code. `headline` is the exception as Python prints it; empty if there was none.
    """

    cause: str
    values: dict[str, str]
    headline: str = ""
    frame: Frame | None = None

    @property
    def title(self) -> str:
        """Return what happened, in the reader's language."""
        return str(CAUSES_BY_NAME[self.cause].title) % _Values(self.values)

    @property
    def advice(self) -> str:
        """Return what to do, in the reader's language."""
        return str(CAUSES_BY_NAME[self.cause].advice) % _Values(self.values)

    @property
    def fix(self) -> Fix:
        """Return the kind of the fix."""
        return CAUSES_BY_NAME[self.cause].fix


class _Values(dict[str, str]):
    """Values that a sentence contains. An ellipsis replaces a missing value."""

    def __missing__(self, name: str) -> str:
        return "…"


PACKAGE_BY_MODULE = {
    "cv2": "opencv-python-headless", "sklearn": "scikit-learn", "PIL": "pillow", "yaml": "pyyaml",
    "skimage": "scikit-image", "bs4": "beautifulsoup4", "dateutil": "python-dateutil", "google": "protobuf",
    "pytorch_lightning": "pytorch-lightning", "attr": "attrs", "dotenv": "python-dotenv", "Crypto": "pycryptodome",
}  # fmt: skip
"""The package that contains a module, by the name of the module, where the two names differ."""

CAUSES: tuple[Cause, ...] = (
    # Most of these causes are known from how the run ended. `_match` compares all reasons and codes before any output,
    # because output is less reliable.
    Cause(
        "out_of_memory",
        gettext_lazy("The node ran out of memory."),
        gettext_lazy("Use a node type with more memory, a smaller batch, or fewer processes per node."),
        Fix.LARGER_NODE,
        reasons=frozenset({EndReason.OUT_OF_MEMORY}),
        codes=frozenset({FailureCode.OUT_OF_MEMORY}),
    ),
    Cause(
        "disk_full",
        gettext_lazy("The run wrote more than its disk holds."),
        gettext_lazy("Write less, delete old checkpoints during the run, or free storage in your organization."),
        Fix.FILES,
        reasons=frozenset({EndReason.DISK_FULL}),
        codes=frozenset({FailureCode.DISK_FULL}),
    ),
    Cause(
        "time_limit",
        gettext_lazy("The run reached its time limit before it was done."),
        gettext_lazy("Run it again with a higher limit or on more nodes. It can continue from its last checkpoint."),
        Fix.LONGER,
        reasons=frozenset({EndReason.TIME_LIMIT}),
    ),
    Cause(
        "hang",
        gettext_lazy("The run hung: no rank made progress any more."),
        gettext_lazy(
            "Often one rank has fewer batches than the others, or skips a collective operation. Give each "
            "rank the same number of batches, for example with DistributedSampler and drop_last. The "
            "stacks of the attempt show where each rank waited."
        ),
        reasons=frozenset({EndReason.HUNG}),
    ),
    Cause(
        "packages_failed",
        gettext_lazy("The packages of the requirements file could not be installed."),
        gettext_lazy("The output of the installation is in the overview. Correct the file and run again."),
        Fix.REQUIREMENTS,
        reasons=frozenset({EndReason.PACKAGES_FAILED}),
    ),
    Cause(
        "too_many_processes",
        gettext_lazy("The code started more processes or threads than a node allows."),
        gettext_lazy(
            "Use fewer DataLoader workers and threads. With several ranks per node, each has its own workers."
        ),
        patterns=(r"can't start new thread", r"BlockingIOError: \[Errno 11\]", r"pthread_create failed"),
        codes=frozenset({FailureCode.TOO_MANY_PROCESSES}),
    ),
    Cause(
        "launcher_killed",
        gettext_lazy("The code stopped the platform's own process on the node."),
        gettext_lazy("Send signals only to processes that your code starts."),
        codes=frozenset({FailureCode.LAUNCHER_KILLED}),
    ),
    Cause(
        "platform",
        gettext_lazy("The platform could not complete this run."),
        gettext_lazy("This was not your code, so this attempt is free. Run it again."),
        Fix.RERUN,
        reasons=frozenset({EndReason.NODE_LOST, EndReason.PLATFORM_ERROR, EndReason.NO_CAPACITY}),
    ),
    Cause(
        "ranks_not_started",
        gettext_lazy("mpirun did not start all ranks."),
        gettext_lazy(
            "Some ranks had started, so your code may have stopped mpirun. Let it run until all ranks have started."
        ),
        codes=frozenset({FailureCode.RANKS_NOT_STARTED}),
    ),
    Cause(
        "image",
        gettext_lazy("The image of this run could not be used."),
        gettext_lazy("Your code did not start. Correct the image or its registry's credentials, then run it again."),
        Fix.RERUN,
        codes=IMAGE_FAILURES,
    ),
    Cause(
        "refused",
        gettext_lazy("The run could not start as it was ordered."),
        gettext_lazy("Your code did not start. Correct what is missing, then run it again."),
        Fix.RERUN,
        codes=frozenset({FailureCode.REFUSED}),
    ),
    # Arguments of the script.
    Cause(
        "local_rank",
        gettext_lazy("The script does not accept the argument %(argument)s."),
        gettext_lazy(
            "Set *Local rank argument* under the advanced options to the form that the script declares, "
            "or to none and read LOCAL_RANK from the environment."
        ),
        Fix.RERUN,
        (r"unrecognized arguments:.{0,200}?(?P<argument>--local[-_]rank)",),
    ),
    Cause(
        "unknown_argument",
        gettext_lazy("The script does not know these arguments: %(arguments)s"),
        gettext_lazy("Correct the arguments of the order, or declare them in the script."),
        Fix.RERUN,
        (r"error: unrecognized arguments: (?P<arguments>.{1,200})", r"[Nn]o such option:? (?P<arguments>.{1,100})"),
    ),
    Cause(
        "missing_argument",
        gettext_lazy("The script needs these arguments: %(arguments)s"),
        gettext_lazy("Add them to the arguments of the order."),
        Fix.RERUN,
        (
            r"error: the following arguments are required: (?P<arguments>.{1,200})",
            r"Error: Missing (?:option|argument) (?P<arguments>.{1,100})",
        ),
    ),
    Cause(
        "invalid_argument",
        gettext_lazy("The script refused the argument %(argument)s: %(why)s"),
        gettext_lazy("Correct the arguments of the order."),
        Fix.RERUN,
        (r"error: argument (?P<argument>[^:\n]{1,80}): (?P<why>.{1,200})",),
    ),
    Cause(
        "missing_variable",
        gettext_lazy("The environment variable %(variable)s is not set."),
        gettext_lazy("Add it to the environment of the order, or as a secret if it is one."),
        Fix.RERUN,
        (r"KeyError: ['\"](?P<variable>[A-Z][A-Z0-9_]{1,80})['\"]",),
        # Only for a missing variable, not for a key of any dictionary: the traceback shows the customer's line or the
        # line of Python's `os` module that raised the error.
        context=r"os\.environ|raise KeyError\(key\) from None",
    ),
    # Imports and syntax.
    Cause(
        "missing_module",
        gettext_lazy("The module %(module)s is not installed."),
        gettext_lazy(
            "Add the line %(package)s to a requirements.txt and choose that file in the order. The "
            "packages are installed before the run, free of charge. If it is a file of your own, check "
            "its folder and name."
        ),
        Fix.REQUIREMENTS,
        (r"No module named '?(?P<module>[\w.]{1,120})",),
    ),
    Cause(
        "missing_library",
        gettext_lazy("The system library %(library)s is missing in the image."),
        gettext_lazy("Use a package that includes it, such as opencv-python-headless, or an image of your own."),
        Fix.REQUIREMENTS,
        # Without libcuda, NVIDIA's driver, which no package has: see `no_gpu`.
        (r"(?P<library>lib(?!cuda\.so)[\w.+-]{1,80}\.so[\w.]{0,20}): cannot open shared object file",),
    ),
    Cause(
        "import_name",
        gettext_lazy("The module %(module)s has no %(name)s."),
        gettext_lazy(
            "The installed version differs from the one that the code was written for, or a file of yours "
            "has the name of a package. Correct the import, or pin the version in requirements.txt."
        ),
        patterns=(r"cannot import name '(?P<name>\w{1,120})' from [^']{0,40}'(?P<module>[\w.]{1,120})'",),
    ),
    Cause(
        "syntax",
        gettext_lazy("The code is not valid Python."),
        gettext_lazy("Correct the line. Indent with spaces or tabs, not with both."),
        patterns=(r"^(?:SyntaxError|IndentationError|TabError)\b",),
    ),
    Cause(
        "undefined_name",
        gettext_lazy("The name %(name)s is not defined."),
        gettext_lazy("Define or import it before this line, or correct its spelling."),
        patterns=(
            r"NameError: name '(?P<name>\w{1,120})' is not defined",
            r"UnboundLocalError: (?:cannot access local variable|local variable) '(?P<name>\w{1,120})'",
        ),
    ),
    # DataLoader workers. They come before memory, files and signals, whose general patterns match these texts too.
    Cause(
        "shared_memory",
        gettext_lazy("The workers of a DataLoader ran out of shared memory."),
        gettext_lazy("Set num_workers to a lower number, or to 0. Smaller batches need less shared memory too."),
        patterns=(
            r"out of shared memory",
            r"insufficient shared memory",
            r"unable to (?:write to|open|mmap).{0,80}/torch_",
            r"killed by signal: Bus error",
            r"/shm\b.{0,80}No space left",
            r"No space left on device.{0,80}/shm\b",
        ),
    ),
    Cause(
        "worker_died",
        gettext_lazy("A worker process of a DataLoader died."),
        gettext_lazy("Its memory may have run out: set num_workers lower. With num_workers=0 the real error is shown."),
        patterns=(r"DataLoader worker \(pid.{0,80}(?:killed by signal|exited unexpectedly)",),
    ),
    Cause(
        "pickling",
        gettext_lazy("An object cannot be passed to another process: %(what)s"),
        gettext_lazy(
            "DataLoader workers and spawned processes get pickled copies. Define functions and classes at "
            "the top level of a module instead of lambdas and local functions, and open files in the "
            "worker."
        ),
        patterns=(
            r"(?P<what>Can't pickle .{1,150})",
            r"(?P<what>[Cc]annot pickle .{1,150})",
            r"(?P<what>Can't get (?:local object|attribute) .{1,150})",
        ),
    ),
    # Memory.
    Cause(
        "gpu_out_of_memory",
        gettext_lazy("The GPU ran out of memory."),
        gettext_lazy("Use a smaller batch, mixed precision, or a node type with a larger GPU."),
        Fix.SMALLER_BATCH,
        (
            r"CUDA out of memory",
            r"OutOfMemoryError: (?:CUDA|HIP)",
            r"CUDA_ERROR_OUT_OF_MEMORY",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"ResourceExhaustedError.{0,20}OOM",
            r"OOM when allocating tensor",
        ),
    ),
    Cause(
        "allocation",
        gettext_lazy("The code asked for more memory than the node has."),
        gettext_lazy("Use a node type with more memory or a smaller batch, or load the data in parts."),
        Fix.LARGER_NODE,
        (
            r"^MemoryError\b",
            r"can't allocate memory",
            r"Unable to allocate .{1,60} for an array",
            r"Cannot allocate memory",
            r"std::bad_alloc",
            r"not enough memory",
        ),
    ),
    # GPUs and devices.
    Cause(
        "checkpoint_device",
        gettext_lazy("A checkpoint was saved on a GPU, and this process has none."),
        gettext_lazy("Load it with torch.load(path, map_location=device)."),
        patterns=(r"Attempting to deserialize object on (?:a )?CUDA device",),
    ),
    Cause(
        "no_gpu",
        gettext_lazy("The code uses CUDA, but the node has no GPU that it can use."),
        gettext_lazy(
            "Choose a node type with a GPU, or select the device with torch.cuda.is_available(). On nodes "
            "without a GPU the backend is gloo: pass the variable BACKEND to init_process_group."
        ),
        Fix.GPU_NODE,
        (
            r"Torch not compiled with CUDA enabled",
            r"No CUDA GPUs are available",
            r"Found no NVIDIA driver",
            r"CUDA driver version is insufficient",
            r"ProcessGroupNCCL is only supported with GPUs",
            r"no CUDA-capable device",
            r"Distributed package doesn't have NCCL",
            r"libcuda\.so\.1",
        ),
    ),
    Cause(
        "device_number",
        gettext_lazy("The code uses a GPU number that the node does not have."),
        gettext_lazy("Use LOCAL_RANK, not RANK, as the number of the GPU."),
        patterns=(r"invalid device ordinal", r"Invalid device id", r"device ID .{0,40}out of range"),
    ),
    Cause(
        "wrong_device",
        gettext_lazy("Tensors of one operation are on different devices."),
        gettext_lazy("Move the model and every batch to the same device with .to(device)."),
        patterns=(
            r"[Ee]xpected all tensors to be on the same device",
            r"torch\.cuda\.\w{1,40}\) and weight type \(torch\.\w{1,40}\)",
            r"torch\.\w{1,40}Tensor\) and weight type \(torch\.cuda",
            r"found at least two devices",
            r"tensor on device .{1,40} is not on the expected device",
        ),
    ),
    Cause(
        "label_range",
        gettext_lazy("A label or an index is out of range."),
        gettext_lazy(
            "Labels must be from 0 to the number of classes minus 1, and indices below the size of the "
            "embedding. Compare the labels of the dataset with the last layer."
        ),
        patterns=(
            r"Target -?\d{1,12} is out of bounds",
            r"index out of range in self",
            r"device-side assert triggered",
            r"Assertion `t >= 0 && t < n_classes` failed",
            r"IndexError: (?:list |tuple )?index out of range",
            r"IndexError: index -?\d{1,12} is out of bounds",
        ),
    ),
    # Types before shapes, because the texts of both say that two tensors "must match".
    Cause(
        "wrong_type",
        gettext_lazy("Tensors have different or unsupported number types."),
        gettext_lazy("Convert them before this line, for example with .float(), .long() or .to(weight.dtype)."),
        patterns=(
            r"expected scalar type \w{1,40} but found",
            r"must have the same dtype",
            r"have the same dtype, but got",
            r"Input type \(.{1,60}\) and (?:weight|bias) type \(.{1,60}\) should be the same",
            r"result type \w{1,40} can't be cast",
            r"not implemented for '\w{1,40}'",
            r"expected .{1,40}dtype .{1,40}but got",
            r"Found dtype \w{1,40} but expected \w{1,40}",
            r"can't convert np\.ndarray of type numpy\.object_",
            r"Only Tensors of floating point",
        ),
    ),
    # Before `wrong_shape`, because these errors also list each "size mismatch".
    Cause(
        "state_dict",
        gettext_lazy("The checkpoint does not fit the model."),
        gettext_lazy(
            "The names or shapes of its parameters differ. A model inside DistributedDataParallel has "
            "names that begin with module.: save model.module.state_dict(). To start anew, order without "
            "the checkpoint."
        ),
        patterns=(r"loading state_dict for", r"Missing key\(s\) in state_dict", r"Unexpected key\(s\) in state_dict"),
    ),
    Cause(
        "wrong_shape",
        gettext_lazy("The shapes of tensors do not fit: %(shapes)s"),
        gettext_lazy(
            "Print the shapes before this line. The last, smaller batch of an epoch is a common cause: drop_last=True."
        ),
        patterns=(
            r"(?P<shapes>mat1 and mat2 shapes cannot be multiplied.{0,80})",
            r"(?P<shapes>The size of tensor a .{1,120})",
            r"(?P<shapes>[Ee]xpected input.{1,120}channels)",
            r"(?P<shapes>Expected input batch_size .{1,100})",
            r"(?P<shapes>shape '.{1,80}' is invalid for input of size \d{1,12})",
            r"(?P<shapes>stack expects each tensor to be equal size.{0,80})",
            r"(?P<shapes>size mismatch.{0,100})",
            r"(?P<shapes>operands could not be broadcast.{0,80})",
            r"(?P<shapes>shapes .{1,60} not aligned.{0,40})",
            r"(?P<shapes>Dimension out of range.{0,100})",
            r"(?P<shapes>Incompatible shapes.{0,80})",
            r"(?P<shapes>Sizes of tensors must match.{0,100})",
            r"(?P<shapes>input_size .{0,40}must be equal.{0,60})",
        ),
    ),
    # Several ranks.
    Cause(
        "unused_parameters",
        gettext_lazy("Some parameters of the model got no gradient in a step."),
        gettext_lazy(
            "Use every layer in forward() and in the loss, or pass find_unused_parameters=True to "
            "DistributedDataParallel."
        ),
        patterns=(
            r"Expected to have finished reduction in the prior iteration",
            r"parameters that were not used in producing",
        ),
    ),
    Cause(
        "uneven_inputs",
        gettext_lazy("The ranks did not do the same collective operations."),
        gettext_lazy(
            "Each rank must take the same number of steps with tensors of the same shape. Use "
            "DistributedSampler with drop_last, and no collective operation under “if rank == 0”."
        ),
        patterns=(
            r"Detected mismatch between collectives",
            r"op\.preamble\.length <= op\.nbytes",
            r"Mismatched .{1,60}(?:shapes|types|operations)",
            r"One or more tensors were submitted to be reduced.{0,100}subset of ranks",
            r"monitoredBarrier",
        ),
    ),
    Cause(
        "collective_timeout",
        gettext_lazy("A collective operation timed out: a rank did not take part."),
        gettext_lazy(
            "A rank took fewer steps, was much slower, or waited elsewhere. Give all ranks the same "
            "number of batches. For long work on one rank, set a longer collective timeout."
        ),
        Fix.RERUN,
        (
            r"Watchdog caught collective operation timeout",
            r"gloo.{1,200}Timed out waiting",
            r"Timed out waiting \d{1,12}ms for",
            r"NCCL.{0,80}time(?:d )?out",
            r"collective operation time(?:d )?out",
            r"Application timeout caused pair closure",
            r"Stalled (?:ranks|tensor)",
        ),
    ),
    Cause(
        "port_taken",
        gettext_lazy("A port is already in use on the node."),
        gettext_lazy("Use MASTER_ADDR and MASTER_PORT of the environment, and port 0 for servers of your own."),
        patterns=(r"[Aa]ddress already in use", r"EADDRINUSE", r"errno: 98"),
    ),
    Cause(
        "rendezvous",
        gettext_lazy("The ranks did not all connect to each other in time."),
        gettext_lazy(
            "Call init_process_group(init_method='env://') in every rank, with RANK and WORLD_SIZE of the "
            "environment. A fixed address, port or world_size in the code has this effect."
        ),
        patterns=(
            r"waiting for clients\. \d{1,6}/\d{1,6} clients joined",
            r"wait timeout after \d{1,12}ms",
            r"client socket has (?:failed to connect|timed out)",
            r"failed to connect to any network address",
            r"Connect timeout",
            r"DistNetworkError",
            r"DistStoreError",
            r"Socket Timeout",
        ),
        codes=frozenset({FailureCode.NODES_NOT_MET}),
    ),
    Cause(
        "process_group",
        gettext_lazy("torch.distributed was used before it was initialized."),
        gettext_lazy("Call init_process_group before DistributedDataParallel, samplers and collective operations."),
        patterns=(
            r"Default process group has not been initialized",
            r"process group (?:is|was) not initialized",
            r"environment variable \w{1,40} expected, but not set",
            r"trying to initialize the default process group twice",
        ),
    ),
    Cause(
        "horovod",
        gettext_lazy("Horovod was not initialized, or is not in this image."),
        gettext_lazy("Call hvd.init() first, and choose an image with Horovod for your framework."),
        patterns=(
            r"Horovod has not been (?:initialized|built)",
            r"Extension horovod\.\w{1,40} has not been built",
            r"HorovodInternalError",
            r"horovod\.\w{1,60} (?:is not|has not been) (?:built|initialized)",
            r"Horovod.{0,60}hvd\.init\(\)",
        ),
    ),
    Cause(
        "tf_config",
        gettext_lazy("TensorFlow could not form its cluster from TF_CONFIG."),
        gettext_lazy(
            "The platform sets TF_CONFIG. Do not change it, and create MultiWorkerMirroredStrategy at the "
            "start of the program, before any other operation."
        ),
        patterns=(
            r"TF_CONFIG",
            r"[Cc]ollective ops must be configured at program startup",
            r"task_type.{0,60}not in.{0,20}cluster",
        ),
    ),
    Cause(
        "nccl",
        gettext_lazy("NCCL failed."),
        gettext_lazy(
            "Set NCCL_DEBUG=INFO in the environment of the order and run again: the log then names the reason."
        ),
        Fix.RERUN,
        (r"ncclSystemError|ncclUnhandledCudaError|ncclInternalError|ncclRemoteError", r"NCCL error in"),
    ),
    Cause(
        "no_network",
        gettext_lazy("The code could not reach an address: %(why)s"),
        gettext_lazy(
            "A run may have no access to the internet. Upload the data as a dataset, publish weights as a "
            "model, and list packages in requirements.txt."
        ),
        patterns=(
            r"(?P<why>Name or service not known)",
            r"(?P<why>Temporary failure in name resolution)",
            r"(?P<why>getaddrinfo failed)",
            r"(?P<why>Failed to resolve '[^']{1,100}')",
            r"(?P<why>Network is unreachable)",
            r"(?P<why>Max retries exceeded with url)",
            r"(?P<why>urlopen error .{1,80})",
            r"(?P<why>We couldn't connect to '[^']{1,100}')",
        ),
    ),
    Cause(
        "connection",
        gettext_lazy("A connection failed: %(why)s"),
        gettext_lazy(
            "Connect to other ranks only through MASTER_ADDR and MASTER_PORT, after their server has "
            "started. If the address is one outside, the run may have no access to it."
        ),
        patterns=(
            r"(?P<why>Connection refused)",
            r"(?P<why>Connection reset by peer)",
            r"(?P<why>Connection closed by peer)",
            r"(?P<why>Broken pipe)",
            r"(?P<why>Connection timed out)",
        ),
    ),
    # Files.
    Cause(
        "missing_file",
        gettext_lazy("The file %(path)s does not exist."),
        gettext_lazy(
            "Build paths from DATASETS_PATH for datasets, OUTPUT_DIR for results and WORKSPACE for your "
            "own files. The working directory is the folder of the script."
        ),
        patterns=(
            r"No such file or directory: b?['\"](?P<path>[^'\"\n]{1,300})['\"]",
            r"can't open file '(?P<path>[^'\n]{1,300})'",
            r"(?P<path>[^\s:'\"]{1,300}): No such file or directory",
            r"[Cc]ould not find (?:a )?file '?(?P<path>[^'\n]{1,300})",
            r"Dataset not found",
        ),
    ),
    # Here a write of the code failed. In the cause `disk_full` above, the platform ended the run.
    Cause(
        "full_disk_error",
        gettext_lazy("There is no space left to write to."),
        gettext_lazy("Write less, delete old checkpoints during the run, or free storage in your organization."),
        Fix.FILES,
        (r"No space left on device", r"Disk quota exceeded", r"\[Errno (?:28|122)\]"),
    ),
    Cause(
        "read_only",
        gettext_lazy("The code wrote to a place that is read-only: %(path)s"),
        gettext_lazy(
            "Datasets, models and the image are read-only. Write results to OUTPUT_DIR and checkpoints to "
            "CHECKPOINT_DIR."
        ),
        patterns=(r"Read-only file system(?:: '(?P<path>[^'\n]{1,300})')?",),
    ),
    Cause(
        "permission",
        gettext_lazy("The code may not use this file or address: %(path)s"),
        gettext_lazy(
            "Write results to OUTPUT_DIR, checkpoints to CHECKPOINT_DIR and other files to the workspace. "
            "Use ports above 1024."
        ),
        patterns=(
            r"Permission denied(?:: '(?P<path>[^'\n]{1,300})')?",
            r"Operation not permitted(?:: '(?P<path>[^'\n]{1,300})')?",
        ),
    ),
    Cause(
        "open_files",
        gettext_lazy("The code has too many files open."),
        gettext_lazy("Close files after use, or call torch.multiprocessing.set_sharing_strategy('file_system')."),
        patterns=(r"Too many open files", r"received 0 items of ancdata"),
    ),
    Cause(
        "checkpoint_unreadable",
        gettext_lazy("A checkpoint or model file cannot be read."),
        gettext_lazy(
            "It was cut off, or has another format. Write checkpoints under another name first, then "
            "rename them. Load older files that you trust with weights_only=False."
        ),
        patterns=(
            r"Weights only load failed",
            r"UnpicklingError",
            r"PytorchStreamReader failed",
            r"invalid load key",
            r"HeaderTooLarge",
            r"EOFError: Ran out of input",
        ),
    ),
    Cause(
        "encoding",
        gettext_lazy("A file or text has an unexpected encoding."),
        gettext_lazy("Pass the encoding to open(), for example encoding='utf-8', or open the file in binary mode."),
        patterns=(r"Unicode(?:Decode|Encode)Error",),
    ),
    Cause(
        "json",
        gettext_lazy("A file is not valid JSON."),
        gettext_lazy("It may be empty, cut off, or written by several ranks at once. Let one rank write it."),
        patterns=(r"JSONDecodeError",),
    ),
    # The training itself.
    Cause(
        "not_a_number",
        gettext_lazy("A value became NaN or infinite."),
        gettext_lazy("Lower the learning rate, clip the gradients, and check the data for missing values."),
        patterns=(
            r"returned nan values",
            r"(?i:\bloss\b.{0,40}\b(?:nan|inf)\b)",
            r"(?i:contains? (?:nan|infinity|inf)\b)",
            r"FloatingPointError",
            r"(?i:\bnan\b.{0,30}\bloss\b)",
            r"invalid values:\s*tensor\(\[.{0,20}nan",
        ),
    ),
    Cause(
        "autograd",
        gettext_lazy("The gradients could not be computed."),
        gettext_lazy(
            "Do not change tensors in place between forward and backward, call backward once per forward, "
            "and compute the loss from the model's output."
        ),
        patterns=(
            r"modified by an inplace operation",
            r"backward through the graph a second time",
            r"does not require grad and does not have",
            r"leaf Variable that requires grad",
        ),
    ),
    Cause(
        "call",
        gettext_lazy("A function was called with the wrong arguments: %(call)s"),
        gettext_lazy(
            "The installed version may differ from the one that the code was written for. Compare them, "
            "or pin the version."
        ),
        patterns=(
            r"TypeError: (?P<call>.{1,100}(?:missing \d{1,3} required|unexpected keyword argument).{0,100})",
            r"TypeError: (?P<call>.{1,100}positional arguments? but.{0,100})",
            r"AttributeError: (?P<call>(?:module )?'.{1,100}' (?:object )?has no attribute .{1,100})",
        ),
    ),
    Cause(
        "assertion",
        gettext_lazy("An assertion of the code failed."),
        gettext_lazy("The line states a condition that did not hold. Print its values before it."),
        patterns=(r"^AssertionError\b",),
    ),
    Cause(
        "key",
        gettext_lazy("The key %(key)s does not exist."),
        gettext_lazy("Print the keys before this line. A checkpoint or record of another version has other keys."),
        patterns=(r"KeyError: (?P<key>.{1,160})",),
    ),
    Cause(
        "interrupted",
        gettext_lazy("The code was interrupted."),
        gettext_lazy("A signal ended it, as when a run is cancelled. Run it again if that was not intended."),
        Fix.RERUN,
        (r"^KeyboardInterrupt\b",),
        signals=frozenset({"SIGINT", "SIGTERM"}),
        reasons=frozenset({EndReason.CANCELLED}),
    ),
    Cause(
        "exception",
        gettext_lazy("The code raised %(exception)s."),
        gettext_lazy("The line and the message show where and why. The log has the whole traceback."),
    ),
    # Crashes without an exception.
    Cause(
        "segmentation_fault",
        gettext_lazy("The process crashed in compiled code (%(signal)s)."),
        gettext_lazy(
            "A compiled package does not fit this image or crashed on its input. Pin its version, or set "
            "PYTHONFAULTHANDLER=1 in the environment of the order to see the Python line."
        ),
        Fix.RERUN,
        (r"(?P<signal>Segmentation fault)", r"(?P<signal>Bus error)"),
        signals=frozenset({"SIGSEGV", "SIGBUS", "SIGFPE"}),
    ),
    Cause(
        "illegal_instruction",
        gettext_lazy("The process used an instruction that the node's processor does not have."),
        gettext_lazy("A package was built for another processor. Install it from source, or choose another node type."),
        Fix.RERUN,
        (r"Illegal instruction",),
        signals=frozenset({"SIGILL"}),
    ),
    Cause(
        "aborted",
        gettext_lazy("The process aborted in compiled code."),
        gettext_lazy("The last lines of the log name the failed check."),
        Fix.RERUN,
        (r"terminate called",),
        signals=frozenset({"SIGABRT"}),
    ),
    Cause(
        "killed",
        gettext_lazy("The process was killed (%(signal)s)."),
        gettext_lazy(
            "The code or a program that it started sent the signal. If memory was short, use a larger node type."
        ),
        Fix.RERUN,
        signals=frozenset({"SIGKILL"}),
    ),
    Cause(
        "exit",
        gettext_lazy("The code ended itself with exit code %(exit_code)s."),
        gettext_lazy("It called sys.exit or a program failed. The last lines of the log say more."),
    ),
)
"""The known causes, in the order in which they are compared. `exception` and `exit` have no condition: one of them
applies if no other cause matches."""
CAUSES_BY_NAME: Mapping[str, Cause] = {cause.name: cause for cause in CAUSES}


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the most likely cause of a failure."""
    lines = _lines(evidence.log)
    block = _last_block(lines)
    headline = _headline(evidence, block)
    frame = _own_frame(block) or _reported_frame(evidence)  # only the printed frame has the source of the line
    cause, values = _match(evidence, headline, "\n".join(block))
    values |= {
        "exception": _short(headline or evidence.exception or "…"),
        "signal": values.get("signal") or evidence.signal,
    }
    if evidence.exit_code is not None:
        values["exit_code"] = str(evidence.exit_code)
    if cause.name == "missing_module":
        top_module = values["module"].partition(".")[0]
        values |= {"package": PACKAGE_BY_MODULE.get(top_module, top_module)}
    return Diagnosis(
        cause.name, {name: _short(value) for name, value in values.items() if value}, _short(headline), frame
    )


def _match(evidence: Evidence, headline: str, block: str) -> tuple[Cause, dict[str, str]]:
    """Return the first cause that matches, and the values of its pattern's named groups.

    The causes are compared in this order: by the run's reason and failure code, by their patterns in the exception's
    headline, by their patterns in the whole block of lines, and by the run's signal. If none matches, the cause is
    `exception` or `exit`.
    """
    for cause in CAUSES:
        if evidence.reason in cause.reasons or evidence.code in cause.codes:
            return cause, {}
    for text in (headline, block):
        for cause in CAUSES:
            match = cause.search(text)
            if match and (not cause.context or re.search(cause.context, block)):
                return cause, {name: value for name, value in match.groupdict().items() if value}
    for cause in CAUSES:
        if evidence.signal in cause.signals:
            return cause, {}
    return CAUSES_BY_NAME["exception" if headline else "exit"], {}


def _lines(log: str) -> list[str]:
    """Return the last lines of the output without control characters and prefixes; the first may be incomplete."""
    text = CONTROL.sub("", log[-MAX_LOG_LENGTH:].replace("\r\n", "\n"))
    return [RANK_PREFIX.sub("", line[:MAX_LINE_LENGTH]) for line in text.split("\n")]


def _last_block(lines: list[str]) -> list[str]:
    """Return the lines from the last traceback on, or from the traceback before it if Python chained the two.

    Without a traceback, return the last MAX_BLOCK_LINES lines.
    """
    starts = [number for number, line in enumerate(lines) if line.strip().endswith(TRACEBACK)]
    if not starts:
        return lines[-MAX_BLOCK_LINES:]
    start = starts[-1]
    # Between chained tracebacks, Python writes "During handling of the above exception, …" with empty lines around it.
    if len(starts) > 1 and any("exception" in line for line in lines[max(0, start - 3) : start]):
        start = starts[-2]
    return lines[start:]


def _headline(evidence: Evidence, block: list[str]) -> str:
    """Return the exception and its message, as Python prints them; empty if the code raised none."""
    if evidence.exception == "SystemExit":  # the code ended itself, and the reported message is only the exit code
        return ""
    # The line that names the exception is not indented and follows a frame. Later lines continue its message.
    printed_line, after_frame = "", False
    for line in block:
        if FRAME.match(line):
            after_frame = True
        elif after_frame and EXCEPTION.match(line):
            printed_line, after_frame = line, False
    if evidence.exception:
        reported = f"{evidence.exception}: {evidence.message}" if evidence.message else evidence.exception
        # A printed line of the same exception is preferred: it has the type's module and more of the message.
        return printed_line if evidence.exception.rpartition(".")[2] in printed_line else reported[:MAX_LINE_LENGTH]
    return printed_line


def _own_frame(block: list[str]) -> Frame | None:
    """Return the last frame of the traceback in the customer's own files; None if there is none."""
    frame = None
    for number, line in enumerate(block):
        match = FRAME.match(line)
        if match is None or LIBRARY.search(match[1]):
            continue
        following = block[number + 1] if number + 1 < len(block) else ""
        source = following.strip() if following.startswith("    ") and not FRAME.match(following) else ""
        function = (match[3] or "").strip()
        frame = Frame(match[1], int(match[2]), "" if function == "<module>" else _short(function), _short(source))
    return frame


def _reported_frame(evidence: Evidence) -> Frame | None:
    """Return the line that the launcher reported; None if it reported none, or an invalid number."""
    if not evidence.file or not evidence.line.isdecimal() or len(evidence.line) > 9:  # 9 digits, as in FRAME
        return None
    return Frame(_short(evidence.file), int(evidence.line), _short(evidence.function))


def _short(value: str) -> str:
    """Return the text on one line, cut to MAX_VALUE_LENGTH."""
    value = " ".join(value.split())
    return value if len(value) <= MAX_VALUE_LENGTH else value[: MAX_VALUE_LENGTH - 1] + "…"


def evidence_of(reason: str, failure: Mapping[str, Any], log: str = "") -> Evidence:
    """Return the evidence of a failure, which is a `runtime.specs.Failure` as JSON data.

    `log` is the end of the failing rank's output. If it is empty, the last lines in the failure are used.
    """
    data = failure.get("data") or {}
    text = {name: str(data.get(name) or "") for name in ("exception", "message", "file", "line", "function")}
    exit_code = failure.get("exit_code")
    return Evidence(
        reason=reason,
        code=str(failure.get("code") or ""),
        exit_code=exit_code if isinstance(exit_code, int) else None,
        signal=str(failure.get("signal") or ""),
        log=log or "\n".join(str(line) for line in failure.get("last_lines") or ()),
        **text,
    )
