"""Which scripts start warm. How ranks are forked is in backends/test_warm_pool.py."""

import pytest

from runtime.launcher.__main__ import _read_sources
from runtime.launcher.warm import forkserver
from runtime.launcher.warm.client import is_warm_start_useful
from tests.runtime.launcher.test_topology import PLAN

FRAMEWORK = "import torch\n"
NOWHERE = "/nonexistent"
"""A folder without modules that the script could import."""


@pytest.mark.parametrize(
    ("source", "is_warm"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'", False),
        ('os.environ.setdefault("TORCH_LOGS", "x")', False),
        ("os.environ['KERAS_BACKEND'] = 'torch'", False),
        ("os.environ.update({'MKL_NUM_THREADS': '2'})", False),
        ("os.environ.update(\n    {\n        'XLA_FLAGS': ''})", False),
        ("for name in ('OMP_NUM_THREADS',): os.environ[name] = '3'", False),
        ("values = {'OMP_NUM_THREADS': '3'}; os.environ.update( values)", False),
        ("name = 'OMP_NUM_THREADS'; os.environ.update({ name: '3'})", False),
        ("os.environ['RANK']", True),
        ("os.environ['MY_NAME'] = '3'", True),
        ("os.environ.update({'MY_NAME': '3'})", True),
        ("print([os.environ[name] == '3' for name in ('HOME',)])", True),
        ("print('OMP_NUM_THREADS')", True),
        *(
            pytest.param(start + " " * 1_000_000, True, id=f"{start} and spaces, which could be searched for ever")
            for start in ("os.environ[", "os.environ.update(")
        ),
    ],
)
def test_a_script_that_sets_what_a_framework_reads_at_import_starts_cold(source, is_warm):
    assert is_warm_start_useful([FRAMEWORK + source], NOWHERE) is is_warm


@pytest.mark.parametrize(
    ("source", "is_warm"),
    [
        ("print(1)\n", False),
        ("import os, sys as s\nfrom pathlib import Path\n", False),
        ("import os\nimport torch.nn as nn\n", True),
        ("if True:\n    from torch import nn\n", True),
        ("import plain\n", False),
        ("from .plain import x\n", False),
        ("import nested\n", True),
        # What these import is not known, so it may be a framework.
        ("import package\n", True),
        ("import importlib\n", True),
        ("__import__('to' + 'rch')\n", True),
        ("import sys\nsys.path.append('lib')\n", True),
    ],
)
def test_a_script_that_imports_no_framework_starts_cold(tmp_path, source, is_warm):
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "plain.py").write_text("import json\n")
    (tmp_path / "nested.py").write_text("import plain\nimport torch\n")
    (tmp_path / "package").mkdir()
    sources = list(_read_sources(PLAN._replace(script=str(tmp_path / "train.py")), str(tmp_path)))
    assert is_warm_start_useful(sources, str(tmp_path)) is is_warm


def test_forks_of_a_process_with_an_open_gpu_are_refused(tmp_path):
    """The folder stands for /proc/self/fd."""
    (tmp_path / "0").symlink_to("/dev/null")
    forkserver.exit_if_gpu_is_open(str(tmp_path))
    (tmp_path / "7").symlink_to("/dev/nvidia-uvm")
    with pytest.raises(SystemExit, match="/dev/nvidia-uvm"):
        forkserver.exit_if_gpu_is_open(str(tmp_path))
