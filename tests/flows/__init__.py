"""A package, so that the consoles its tests share end with it, and no later test runs beside them."""

import pytest

WHOLE_CONSOLE = [
    pytest.mark.flow,
    pytest.mark.late("it awaits a whole console of processes, with limits of seconds"),
    pytest.mark.cores(2),
    pytest.mark.xdist_group("whole-console"),
]
"""The marks of a test that drives a console of real processes."""
