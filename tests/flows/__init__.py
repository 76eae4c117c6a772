"""Flows through a whole console of real processes."""

import pytest

WHOLE_CONSOLE = [
    pytest.mark.flow,
    pytest.mark.rerun_if_late("it awaits a whole console of processes, with limits of seconds"),
    pytest.mark.cores(2),
    pytest.mark.xdist_group("whole-console"),
]
"""The marks of a test that drives the shared console."""
