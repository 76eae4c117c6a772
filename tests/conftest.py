"""What every test may use: the embedded servers, folders of its own, people and API clients.

`django_db` tests start PostgreSQL and Redis under `var/test` on their own; the last test process to end stops them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import psycopg
import pytest
from django.conf import settings as django_settings
from pytest_django import Settings
from rest_framework.test import APIClient

from billing import gateway
from console.accounts import services as accounts
from console.accounts.models import Membership
from console.accounts.roles import Role
from jobs.backend import cluster
from tests.factories.accounts import MembershipFactory
from tests.provider import Stripe

HEAVY = ("flow", "torch", "browser")
PROCESSES = ("runtime", "flows", "browser", "compat")
"""Folders whose tests kill, freeze and wait for real processes: on a busy machine one may be late once. Such a test is
tried a second time, and the report says so; what is broken fails twice."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that fill the machine run one after another, on one of the test processes."""
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in PROCESSES:
            item.add_marker(pytest.mark.flaky(reruns=1))
        if any(item.get_closest_marker(name) for name in HEAVY):
            item.add_marker(pytest.mark.xdist_group("machine"), append=False)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Long bytes (an archive, with its time of making) must not name a test: each test process would name it anew."""
    return argname if isinstance(val, bytes) and len(val) > 40 else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without Chromium, browser tests are skipped by a person and fail for CI (`CI=true` or `BROWSER=1`)."""
    if item.get_closest_marker("browser") and not any(map(shutil.which, CHROMIUM)):
        sentence = "There is no Chromium: apt-get install chromium"
        if os.environ.get("CI") == "true" or os.environ.get("BROWSER"):
            pytest.fail(sentence)
        pytest.skip(sentence)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """One process tells what failed: the one that has a terminal."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(_Teller(terminal))


class _Teller:
    """Tells at once what failed, and how the machine was: tests that are ended halfway have said why."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal
        self._begun = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test failed, for good or for the first time."""
        if report.outcome not in {"failed", "rerun"}:
            return
        said = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext)
        self._terminal.write_line(
            f"\n{report.outcome.upper()} at {time.monotonic() - self._begun:.0f} s: {report.when} of {report.nodeid}, "
            f"after {report.duration:.0f} s: {said[:600]}\n"
            f"(The machine: load {os.getloadavg()[0]:.1f}, {psutil.cpu_times_percent().steal:.0f} % stolen, "
            f"{psutil.virtual_memory().available >> 20} MiB of memory and "
            f"{shutil.disk_usage(Path(__file__).parent).free >> 20} MiB of disk free.)"
        )


@pytest.fixture(scope="session")
def embedded() -> Iterator[None]:
    """PostgreSQL and Redis. For a test that needs Redis and no database; with a database they are there anyway."""
    servers = django_settings.EMBEDDED
    servers.var.mkdir(parents=True, exist_ok=True)
    with (servers.var / "in-use.lock").open("w") as in_use:
        fcntl.flock(in_use, fcntl.LOCK_SH)
        servers.start()
        _drop_abandoned_databases(servers.socket_dir)
        yield
        if _is_last(in_use):
            servers.stop()


def _is_last(in_use: IO[str]) -> bool:
    try:
        fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _drop_abandoned_databases(host: Path) -> None:
    """Drop the databases of test processes that were killed."""
    with psycopg.connect(host=str(host), user="postgres", dbname="postgres", autocommit=True) as connection:
        for (name,) in connection.execute("SELECT datname FROM pg_database WHERE datname ~ '^test_[0-9]+'").fetchall():
            if not Path("/proc", name.split("_")[1]).exists():
                connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.fixture(scope="session")
def django_db_modify_db_settings(embedded: None) -> None:
    """Pytest-django asks for this before it makes the test database."""


@pytest.fixture(autouse=True)
def _own_folders(settings: Settings, tmp_path: Path) -> None:
    settings.TRAINYARD_STORAGE_ROOT = tmp_path / "storage"
    settings.TRAINYARD_RUNS_ROOT = tmp_path / "runs"
    cluster.cache_clear()


@pytest.fixture
def owner(db: None) -> Membership:
    """The owner of an organization that has not activated the service."""
    return MembershipFactory(role=Role.OWNER)


@pytest.fixture
def member(owner: Membership) -> Membership:
    """A member of the owner's organization."""
    return MembershipFactory(role=Role.MEMBER, organization=owner.organization)


@pytest.fixture
def stranger(db: None) -> Membership:
    """The owner of another organization."""
    return MembershipFactory(role=Role.OWNER)


@pytest.fixture
def api() -> Callable[[Membership | None], APIClient]:
    """`api(membership)` is an API client with a token of the member; `api(None)` is an anonymous one."""

    def client(membership: Membership | None = None) -> APIClient:
        made = APIClient()
        if membership is not None:
            _, secret = accounts.create_token(membership=membership, name="test")
            made.credentials(HTTP_AUTHORIZATION=f"Token {secret}")
        return made

    return client


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Stripe:
    """The payment provider behind the gateway, without a socket."""
    side = Stripe()
    monkeypatch.setattr(gateway, "_client", lambda: side.client)
    return side
