"""What the launcher reads out of scripts before a warm start. How ranks are then born: backends/test_warmstart.py."""

from __future__ import annotations

import time

import pytest

from runtime.launcher.warm import unfit


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'", True),
        ('os.environ.setdefault("TORCH_LOGS", "x")', True),
        ("os.environ.update({'MKL_NUM_THREADS': '2'})", True),
        ("os.environ.update(\n    {\n        'XLA_FLAGS': ''})", True),
        ("os.environ['RANK']", False),
        ("print('OMP_NUM_THREADS')", False),
    ],
)
def test_who_settles_what_a_framework_reads_at_its_start_is_started_cold(source: str, expected: bool) -> None:
    assert unfit([source]) is expected


def test_a_source_of_nothing_but_spaces_is_read_as_fast_as_any() -> None:
    """By the square of its length it was: the node held its place for as long, and no start is paid."""
    begun = time.process_time()
    assert not unfit(["os.environ[" + " " * 1_000_000])
    assert time.process_time() - begun < 30
