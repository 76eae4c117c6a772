"""The fake cluster behind `jobs.backend.cluster`, customers on it, and threads that start together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from django.db import connection

from console.accounts import hints as console_hints
from jobs.backend import cluster
from tests.factories.jobs import Customer
from tests.fakes import FakeBackend


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeBackend]:
    """The cluster."""
    fake = FakeBackend(root=tmp_path / "runs")
    monkeypatch.setattr("jobs.backend.create", lambda _kind, **_options: fake)
    cluster.cache_clear()
    yield fake
    cluster.cache_clear()


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The messages that would have gone to a worker: (task's name, arguments ...)."""
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        console_hints, "_send", lambda task, arguments: sent.append((task.name.rsplit(".", 1)[-1], *arguments))
    )
    return sent


@pytest.fixture
def customer(db: None, backend: FakeBackend) -> Customer:
    """Somebody who can buy."""
    return Customer(backend)


@pytest.fixture
def other(db: None, backend: FakeBackend) -> Customer:
    """Somebody else who can."""
    return Customer(backend)


@pytest.fixture
def together() -> Callable[..., list[Any]]:
    """`together(call, call, ...)` runs calls at once, in threads, and gives their results or exceptions in order."""

    def run(*calls: Callable[[], Any]) -> list[Any]:
        barrier = Barrier(len(calls))

        def one(call: Callable[[], Any]) -> Any:
            barrier.wait()
            try:
                return call()
            except Exception as error:  # given to the test
                return error
            finally:
                connection.close()

        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(one, calls))

    return run
