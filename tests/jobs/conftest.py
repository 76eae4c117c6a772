"""Fixtures of the tests of jobs: messages to workers, and a second customer."""

from __future__ import annotations

from typing import Any

import pytest

from console.core import enqueue as console_hints
from tests.factories.jobs import Customer


@pytest.fixture
def hints(monkeypatch):
    """The tasks sent to a worker: (name, arguments ...)."""
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        console_hints, "_send", lambda task, arguments: sent.append((task.name.rsplit(".", 1)[-1], *arguments))
    )
    return sent


@pytest.fixture
def other(db, backend):
    """A customer of another organization."""
    return Customer(backend)
