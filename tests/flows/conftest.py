"""The console of flows."""

import pytest


@pytest.fixture
def console(whole_console):
    """The console of real processes that all flows share."""
    return whole_console
