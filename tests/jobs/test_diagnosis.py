"""The diagnosis of failures: real scripts that fail, recorded output of other machines, and hostile text."""

# ruff: noqa: E501, ISC004 - a script or a line of output is easier to compare in one piece

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jobs.diagnosis import CAUSES, MAX_VALUE_LENGTH, Evidence, diagnose

IMAGES = Path(os.environ.get("TRAINYARD_IMAGES_ROOT", Path(__file__).parents[2] / "var" / "images"))
PLAIN = {
    "missing_module": ("import numpyy_of_nobody", "The module numpyy_of_nobody is not installed."),
    "import_name": ("from json import loadz", "The module json has no loadz."),
    "missing_file": ("open('data/trian.csv')", "The file data/trian.csv does not exist."),
    "syntax": ("def f(:\n    pass", "not valid Python"),
    "syntax_indentation": ("def f():\npass", "not valid Python"),
    "undefined_name": ("print(lerning_rate)", "The name lerning_rate is not defined."),
    "undefined_name_local": ("def f():\n    print(x)\n    x = 1\nf()", "The name x is not defined."),
    "missing_variable": ("import os; os.environ['WANDB_KEY']", "The environment variable WANDB_KEY is not set."),
    "key": ("{'a': 1}['epoch']", "The key 'epoch' does not exist."),
    "assertion": ("assert 1 == 2, 'sizes differ'", "An assertion"),
    "call": ("def f(a, b): pass\nf(1)", "f() missing 1 required positional argument: 'b'"),
    "call_attribute": ("import math; math.squrt(2)", "module 'math' has no attribute 'squrt'"),
    "label_range": ("[][0]", "out of range"),
    "encoding": ("b'\\xff\\xfe'.decode('utf-8')", "unexpected encoding"),
    "json": ("import json; json.loads('{')", "not valid JSON"),
    "allocation": ("bytearray(1 << 62)", "more memory"),
    "pickling": ("import pickle; pickle.dumps(lambda: 0)", "cannot be passed to another process"),
    "checkpoint_unreadable": ("import pickle; pickle.loads(b'x')", "cannot be read"),
    "port_taken": (
        "import socket\na, b = socket.socket(), socket.socket()\na.bind(('127.0.0.1', 0))\na.listen()\n"
        "b.bind(a.getsockname())", "A port is already in use",
    ),
    "connection": (
        "import socket\na = socket.socket(); a.bind(('127.0.0.1', 0))\nsocket.create_connection(a.getsockname(), 5)",
        "Connection refused",
    ),
    "no_network": ("import socket; socket.getaddrinfo('no-such-host.invalid', 80)", "could not reach an address"),
    "unknown_argument": (
        "import argparse\np = argparse.ArgumentParser()\np.parse_args(['--epoch', '3'])", "--epoch 3",
    ),
    "local_rank": (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--local_rank')\np.parse_args(['--local-rank=0'])",
        "does not accept the argument --local-rank",
    ),
    "missing_argument": (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args([])",
        "needs these arguments: --data",
    ),
    "invalid_argument": (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--n', type=int)\np.parse_args(['--n', 'x'])",
        "refused the argument --n: invalid int value: 'x'",
    ),
    "exit": ("import sys; print('no data'); sys.exit(3)", "exit code 3"),
    "interrupted": ("raise KeyboardInterrupt", "interrupted"),
    "not_a_number": ("raise ValueError('Loss is nan, stopping training')", "NaN"),
    "exception": ("raise ValueError('the sizes are odd')", "ValueError: the sizes are odd"),
    "segmentation_fault": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    "aborted": ("import os; os.abort()", "aborted"),
    "illegal_instruction": ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "does not have"),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "open_files": (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\nfiles = [open('/dev/null') for _ in range(99)]",
        "too many files",
    ),
    "full_disk_error": ("open('/dev/full', 'w').write('x' * 99999)", "no space left"),
}  # fmt: skip
"""Scripts for plain Python and a part of the sentence. The cause is the key, up to a suffix."""
TORCH = {
    "wrong_shape": ("torch.nn.Linear(4, 2)(torch.zeros(3, 5))", "mat1 and mat2 shapes cannot be multiplied (3x5 and 4x2)"),
    "wrong_shape_view": ("torch.zeros(5).view(2, 2)", "shape '[2, 2]' is invalid for input of size 5"),
    "wrong_shape_batch": ("torch.nn.CrossEntropyLoss()(torch.zeros(3, 2), torch.zeros(4).long())", "Expected input batch_size"),
    "wrong_shape_channels": ("torch.nn.Conv2d(1, 2, 3)(torch.zeros(1, 3, 8, 8))", "channels"),
    "wrong_shape_stack": ("torch.stack([torch.zeros(2), torch.zeros(3)])", "equal size"),
    "wrong_type": ("torch.nn.Linear(2, 2)(torch.zeros(2, 2).double())", "number types"),
    "label_range": ("torch.nn.CrossEntropyLoss()(torch.zeros(1, 2), torch.tensor([5]))", "out of range"),
    "label_range_embedding": ("torch.nn.Embedding(3, 2)(torch.tensor([7]))", "out of range"),
    "no_gpu": ("torch.zeros(2).cuda()", "no GPU"),
    "state_dict": ("torch.nn.Linear(2, 2).load_state_dict({'weight': torch.zeros(3, 3)})", "does not fit the model"),
    "autograd": ("torch.zeros(2).sum().backward()", "gradients"),
    "autograd_twice": ("x = torch.ones(2, requires_grad=True); y = (x * x).sum(); y.backward(); y.backward()", "gradients"),
    "process_group": ("import torch.distributed as d; d.all_reduce(torch.zeros(1))", "before it was initialized"),
    "process_group_environment": (
        "import os, torch.distributed as d\nos.environ.pop('RANK', None)\nd.init_process_group('gloo', init_method='env://')",
        "before it was initialized",
    ),
    "rendezvous": (
        "import datetime, torch.distributed as d\n"
        "d.TCPStore('127.0.0.1', 0, 2, True, timeout=datetime.timedelta(seconds=1))", "did not all connect",
    ),
    "worker_died": (
        "import os\nfrom torch.utils.data import DataLoader, Dataset\nclass D(Dataset):\n    def __len__(self): return 2\n"
        "    def __getitem__(self, i): os._exit(1)\nlist(DataLoader(D(), num_workers=1))", "worker process of a DataLoader",
    ),
    "key_in_a_worker": (
        "from torch.utils.data import DataLoader, Dataset\nclass D(Dataset):\n    def __len__(self): return 2\n"
        "    def __getitem__(self, i): return {}['label']\nlist(DataLoader(D(), num_workers=1))", "The key 'label'",
    ),
    "not_a_number": (
        "torch.autograd.set_detect_anomaly(True)\nx = torch.zeros(1, requires_grad=True)\n(torch.sqrt(x) * 0).sum().backward()",
        "NaN",
    ),
    "checkpoint_unreadable": ("open('c.pt', 'wb').write(b'PK nothing'); torch.load('c.pt')", "cannot be read"),
    "allocation": ("torch.empty(1 << 58)", "more memory"),
}  # fmt: skip
"""The same for scripts that begin with `import torch`."""
RECORDED = {
    # PyTorch 2.x on one H200: `torch.zeros(1 << 40, device="cuda")`.
    "gpu_out_of_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4096.00 GiB. GPU 0 has a total "
    "capacity of 139.80 GiB of which 138.58 GiB is free.",
    # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
    "collective_timeout": "[rank1]:[E ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=4) ran for 600029 milliseconds before timing out.",
    # gloo/transport/tcp/unbound_buffer.cc
    "collective_timeout_gloo": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
    "1800000ms for recv operation to complete",
    # gloo/transport/tcp/pair.cc
    "connection": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4321",
    # torch/_utils.py, aten/src/ATen/TensorIterator.cpp
    "wrong_device": "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "wrong_device_input": "RuntimeError: Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
    "device_number": "RuntimeError: CUDA error: invalid device ordinal\nCUDA kernel errors might be asynchronously reported",
    "label_range": "RuntimeError: CUDA error: device-side assert triggered",
    # torch/serialization.py
    "checkpoint_device": "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
    # torch/utils/data/dataloader.py, with 64 MiB of /dev/shm
    "shared_memory": "RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory. Please try to raise your shared memory limit.",
    # Horovod 0.28.1, horovod/common/basics.py and util.py
    "horovod": "ValueError: Horovod has not been initialized; use hvd.init().",
    "horovod_not_built": "ImportError: Extension horovod.torch has not been built: /lib/horovod/torch/mpi_lib_v2.so not found",
    # TensorFlow 2.21, tensorflow/python/distribute/collective_all_reduce_strategy.py
    "tf_config": "RuntimeError: Collective ops must be configured at program startup",
    "tf_config_task": "ValueError: In TF_CONFIG, task_type must be one of the cluster's",
    # torch/csrc/distributed/c10d/reducer.cpp
    "unused_parameters": "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. "
    "This error indicates that your module has parameters that were not used in producing loss.",
    # torch/csrc/distributed/c10d/NCCLUtils.hpp
    "nccl": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled system error, NCCL version "
    "2.27.3\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    # torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp
    "uneven_inputs": "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: ALLREDUCE",
    # The loader of shared libraries, for a CUDA extension on a machine without NVIDIA's driver
    "no_gpu_driver": "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
    "missing_library": "ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
    "too_many_processes": "RuntimeError: can't start new thread",
    "permission": "PermissionError: [Errno 13] Permission denied: '/usr/local/x'",
    "read_only": "OSError: [Errno 30] Read-only file system: '/datasets/mnist/cache.pt'",
}
"""Real output for which a test would need a GPU or several nodes, with its source."""
ENDS = {
    "out_of_memory": {"reason": "out_of_memory", "code": "out_of_memory"},
    "disk_full": {"reason": "disk_full", "code": "disk_full"},
    "time_limit": {"reason": "time_limit", "code": "time_limit"},
    "hang": {"reason": "hung", "code": "hung"},
    "platform": {"reason": "platform_error", "code": "image_network", "log": "KeyError: 'x'"},  # a built-in image
    "packages_failed": {"reason": "packages_failed"},
    "launcher_killed": {"code": "launcher_killed"},
    "ranks_not_started": {"code": "ranks_not_started"},
    "image": {"code": "image_name"},
    "refused": {"code": "refused"},
    "rendezvous": {"code": "nodes_not_met"},
    "interrupted": {"signal": "SIGTERM"},
}
"""Ends of runs that say enough without any output."""
DRIVER = """
import multiprocessing, os, sys
folder, header = sys.argv[1:]
exec(header)

def end(kind, *raised):
    sys.__excepthook__(kind, *raised)
    for worker in multiprocessing.active_children():
        worker.kill()
    if kind is not KeyboardInterrupt:
        os._exit(1)

sys.excepthook = end
for name in sorted(os.listdir(folder)):
    pid = os.fork()
    if pid:
        status = os.waitpid(pid, 0)[1]
        with open(os.path.join(folder, name, "status"), "w") as file:
            file.write(str(os.waitstatus_to_exitcode(status)))
        continue
    os.chdir(os.path.join(folder, name))
    output = os.open("log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    script = os.path.join(folder, name, "train.py")
    sys.path.insert(0, os.path.dirname(script))
    exec(compile(open(script).read(), script, "exec"), {"__name__": "__main__", "__file__": script})
    sys.exit(0)
"""
"""Runs the script of each folder in a fork, so that Python starts once, and PyTorch is imported once. A script that
raises an exception ends at once: Python would clean PyTorch up for most of a second. A KeyboardInterrupt is left to
Python, which then ends by SIGINT."""


def family(name):
    """Return the cause that a key of a table begins with; of several, the longest."""
    return next(
        (cause.name for cause in sorted(CAUSES, key=lambda cause: -len(cause.name)) if name.startswith(cause.name)), ""
    )


def ended(status, log):
    """The evidence of a process as the launcher reports it if it knows of no exception.

    `Evidence` takes the reason, the code, the exit code and the signal.
    """
    name = signal.Signals(-status).name if status < 0 else ""
    return Evidence("code_failed", "rank_killed" if name else "rank_exited", None if name else status, name, log=log)


def misdiagnosed(folder, python, scripts, header):
    """Run the scripts; return what was found and printed where cause, words or frame are not as expected."""
    for name, (script, _words) in scripts.items():
        (folder / name).mkdir()
        (folder / name / "train.py").write_text(f"{header}\n{script}\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([str(python), "-X", "utf8", "-c", DRIVER, str(folder), header], check=True, env=environment)
    wrong = {}
    for name, (_script, words) in scripts.items():
        log, source = ((folder / name / file).read_text() for file in ("log", "train.py"))
        found = diagnose(ended(int((folder / name / "status").read_text()), log))
        is_right = (found.cause, words in found.title) == (family(name), True)
        if is_right and "Traceback" in log and family(name) != "syntax":
            is_right = found.frame.file == str(folder / name / "train.py")
            is_right &= found.frame.source == source.splitlines()[found.frame.line - 1].strip()
        if not is_right:
            wrong[name] = (found, log)
    return wrong


def test_a_script_that_fails_is_diagnosed(tmp_path):
    assert misdiagnosed(tmp_path, sys.executable, PLAIN, "") == {}


@pytest.mark.slow
def test_a_training_that_fails_is_diagnosed(tmp_path):
    python = IMAGES / "pytorch" / "bin" / "python"
    if not python.exists():
        pytest.skip("the PyTorch image is not built")
    assert misdiagnosed(tmp_path, python, TORCH, "import torch") == {}


def test_recorded_output_is_diagnosed():
    for name, output in RECORDED.items():
        log = f'Traceback (most recent call last):\n  File "/workspace/train.py", line 7, in step\n    f()\n{output}\n'
        found = diagnose(Evidence("code_failed", "rank_exited", 1, log=f"epoch 1 loss 0.5\n{log}"))
        assert (found.cause, found.frame.line, found.frame.source) == (family(name), 7, "f()"), found
        # PyTorch puts the rank before each line; a process without an exception prints the text alone.
        prefixed = "".join(f"[rank3]: {line}\n" for line in log.splitlines())
        assert diagnose(Evidence("code_failed", "rank_exited", 1, log=prefixed)).frame == found.frame
        assert diagnose(Evidence("code_failed", "rank_killed", None, "SIGABRT", log=output)).cause == family(name)


def test_the_end_of_a_run_counts_before_its_output():
    for name, end in ENDS.items():
        assert diagnose(Evidence(**{"reason": "code_failed", **end})).cause == name


def test_what_the_launcher_reported_is_enough():
    found = diagnose(
        Evidence(
            "code_failed", "rank_raised", exception="ModuleNotFoundError", message="No module named 'cv2'",
            file="train.py", line="3", function="load",
        )
    )  # fmt: skip
    assert found.cause == "missing_module"
    assert "opencv-python-headless" in found.advice
    assert (found.frame.file, found.frame.line, found.frame.function) == ("train.py", 3, "load")


def test_every_cause_has_complete_sentences_and_a_case_in_a_table():
    tried = {family(name) for table in (PLAIN, TORCH, RECORDED, ENDS) for name in table}
    assert {cause.name for cause in CAUSES} == tried
    assert len(tried) >= 25
    for cause in CAUSES:
        found = diagnose(Evidence("code_failed", "rank_exited", 1))
        object.__setattr__(found, "cause", cause.name)  # its sentences must be complete without values of this cause
        assert "%(" not in found.title + found.advice


HOSTILE = [
    "a" * 200_000, '"' * 50_000, "Traceback (most recent call last):\n" * 5000, '  File "' + "x" * 40_000, "loss " * 10_000,
    "%(exception)s %s %n {0}\n", "\x1b[31m" * 9000, "\x00" * 40_000, "KeyError: " + "k" * 50_000, "\ud800 KeyError: '\ud800'",
    '  File "t.py", line 99999999999999999999, in f\nKeyError: 1', '  File "t.py", line ٣, in f\nKeyError: 1', "\n" * 50_000,
    "/a/b/c" * 8000, "No module named '" + "m" * 40_000, "Traceback (most recent call last):\n" + '  File "<x>", line 1\n' * 900,
]  # fmt: skip


def test_hostile_output_is_read_in_linear_time_and_quoted_briefly():
    for text in HOSTILE:
        evidence = Evidence(
            "code_failed", "rank_raised", 1, exception=text, message=text, file=text, line=text, log=text
        )
        found = diagnose(evidence)  # an exponential pattern would not end
        assert max(map(len, found.values.values())) <= MAX_VALUE_LENGTH
        assert len(found.title) < 600
        assert len(json.dumps(found.values)) < 10_000
        assert found.frame is None or (len(found.frame.source) <= MAX_VALUE_LENGTH and found.frame.line < 10**9)


def test_the_last_traceback_and_the_innermost_line_of_the_customer_count():
    log = textwrap.dedent("""\
        Traceback (most recent call last):
          File "/workspace/old.py", line 1, in <module>
            warn()
        ValueError: caught and printed
        epoch 2 loss 0.4
        Traceback (most recent call last):
          File "/workspace/train.py", line 40, in <module>
            main()
            ~~~~^^
          File "/workspace/model.py", line 12, in forward
            return self.fc(x)
                   ^^^^^^^^^^
          File "/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134, in forward
            return F.linear(input, self.weight, self.bias)
        RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x10 and 12x2)
        """)
    found = diagnose(Evidence("code_failed", "rank_exited", 1, log=log))
    assert found.cause == "wrong_shape"
    assert (found.frame.file, found.frame.line) == ("/workspace/model.py", 12)
    assert (found.frame.function, found.frame.source) == ("forward", "return self.fc(x)")
    assert found.headline.startswith("RuntimeError: mat1")
