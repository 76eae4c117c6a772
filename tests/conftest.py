"""Fixtures of all tests: the embedded servers, temporary folders, people and API clients.

`django_db` tests start PostgreSQL and Redis under `var/test`; the last test process stops them.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import tempfile
import time
import venv
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import psycopg
import pytest
from django.conf import settings as django_settings
from django.core.cache import caches
from django.db import connection as django_connection
from django.test import Client
from django.utils import translation
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from pytest_django import DjangoDbBlocker, Settings
from rest_framework.test import APIClient

from billing import gateway
from console.accounts import services as accounts
from console.accounts.models import Membership
from console.accounts.roles import Role
from console.installation import selectors as installation
from console.observability import redis_client
from console.supervision.embedded import Embedded
from jobs.clusters import cluster
from runtime.images import venvs
from tests import migrations
from tests.console.processes import wait_for
from tests.factories.accounts import MembershipFactory, UserFactory
from tests.factories.jobs import Customer
from tests.factories.sweeps import Sweeper
from tests.fakes import FakeBackend
from tests.flows.console import BARE_IMAGE, SLURM_SPEC, Buyer, Console, served
from tests.provider import Stripe
from tests.runtime.images_of_ours import image_folder
from tests.runtime.packages.index import Index
from tests.slurm.cluster import SlurmCluster, missing_program

# The same examples each time, and no time limits: a busy machine may be slow.
hypothesis_settings.register_profile(
    "trainyard", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("trainyard")

CORES = len(os.sched_getaffinity(0))
MAX_WORKERS = 16
"""Most test processes: each needs database connections and a gigabyte of memory for its runs."""
CHROMIUM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""Programs for the browser tests. The first, a Chromium without windows, uses a sixth less CPU time than the second."""


@pytest.fixture(scope="session")
def short_folders() -> Iterator[Callable[[], Path]]:
    """Return a function that creates folders with short paths, which unix sockets need. They are deleted at the end."""
    base = Path(tempfile.mkdtemp(prefix="ty-"))
    numbers = itertools.count()

    def create() -> Path:
        folder = base / str(next(numbers))
        folder.mkdir(mode=0o700)
        return folder

    def is_deleted() -> bool:
        shutil.rmtree(base, ignore_errors=True)
        return not base.exists()

    yield create
    wait_for(is_deleted, 30)  # a process that is ending may still write


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options that choose the fast tests, or one of N parts."""
    parser.addoption("--fast", action="store_true", help="skip the tests that are marked slow")
    parser.addoption("--shard", type=_shard, metavar="I/N", help="run one of N parts of the test modules")


def _shard(text: str) -> tuple[int, int]:
    number, _slash, count = text.partition("/")
    if not 1 <= int(number) <= int(count):
        raise ValueError(text)
    return int(number), int(count)


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for `-n auto`: more than cores, since tests of real processes mostly wait."""
    return min(CORES + (CORES + 1) // 2, MAX_WORKERS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the shard, and apply our own markers. See `markers` in pyproject.toml."""
    if shard := config.getoption("--shard"):
        number, count = shard
        # A module is in one shard as a whole: its tests share fixtures.
        chosen = [item for item in items if zlib.crc32(item.path.name.encode()) % count == number - 1]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
    for item in items:
        if item.get_closest_marker("rerun_if_late"):
            item.add_marker(pytest.mark.flaky(reruns=2))
        needed = item.get_closest_marker("cores")
        # Such a test takes the whole machine, so only one runs at a time. Whole consoles have a group of their own.
        if needed and needed.args[0] >= CORES and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("machine"))
        if config.getoption("--fast") and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow, left to make test-all"))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Do not name tests by long bytes, such as archives with a time: each process would name them differently."""
    return argname if isinstance(val, bytes) and len(val) > 40 else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip browser tests without Chromium; fail them in CI (`CI=true`) or with `BROWSER=1`."""
    if item.get_closest_marker("browser") and not any(map(shutil.which, CHROMIUM)):
        sentence = "There is no Chromium: apt-get install chromium-headless-shell"
        if os.environ.get("CI") == "true" or os.environ.get("BROWSER"):
            pytest.fail(sentence)
        pytest.skip(sentence)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Report failures from the one process that has a terminal."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(_FailureReporter(terminal))


class _FailureReporter:
    """Reports each failure at once with the state of the machine, in case the tests are ended halfway."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal
        self._begun = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report a failure, or a first failure that is retried."""
        if report.outcome not in {"failed", "rerun"}:
            return
        message = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext)
        self._terminal.write_line(
            f"\n{report.outcome.upper()} at {time.monotonic() - self._begun:.0f} s: {report.when} of {report.nodeid}, "
            f"after {report.duration:.0f} s: {message[:600]}\n"
            f"(The machine: load {os.getloadavg()[0]:.1f}, {psutil.cpu_times_percent().steal:.0f} % stolen, "
            f"{psutil.virtual_memory().available >> 20} MiB of memory and "
            f"{shutil.disk_usage(Path(__file__).parent).free >> 20} MiB of disk free.)"
        )


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line of the skipped tests with reasons, and one for each failure: CI shows only the end of the output."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")
    )
    if reasons:
        needs = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"Skipped {reasons.total()}: {needs}")
    for report in (*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")):
        crash = getattr(report.longrepr, "reprcrash", None)
        message = " ".join(str(crash.message if crash else report.longrepr).split())
        terminalreporter.write_line(f"Not passed: {report.nodeid} ({report.when or 'collection'}): {message[:300]}")


@pytest.fixture(scope="session")
def embedded() -> Iterator[None]:
    """Start PostgreSQL and Redis. Only tests that need Redis and no database request this: a database implies it."""
    servers = django_settings.EMBEDDED
    servers.var.mkdir(parents=True, exist_ok=True)
    with (servers.var / "in-use.lock").open("w") as in_use:
        fcntl.flock(in_use, fcntl.LOCK_SH)
        _start(servers)
        with psycopg.connect(
            host=str(servers.socket_dir), user="postgres", dbname="postgres", autocommit=True
        ) as connection:
            _forgo_durability(connection)
            _drop_abandoned_databases(connection)
        yield
        if _is_last(in_use):
            servers.stop()


def _start(servers: Embedded) -> None:
    """Start the servers. At their first start the template is the database of the flows' consoles: one migration."""
    with (servers.var / "template.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_first = not servers.data_dir.exists()
        if is_first:
            migrations.copy_migrated_database(servers.var)
        servers.start()
        if is_first:
            with psycopg.connect(
                host=str(servers.socket_dir), user="postgres", dbname="postgres", autocommit=True
            ) as connection:
                connection.execute(f'ALTER DATABASE "trainyard" RENAME TO "template_{migrations.digest()}"')


def _is_last(in_use: IO[str]) -> bool:
    """Whether no other test process uses the servers: each holds a shared lock on this file while it does."""
    try:
        fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _forgo_durability(connection: psycopg.Connection) -> None:
    """Let commits return before they are on the disk: test data need not survive a power failure."""
    for option in ("fsync", "synchronous_commit", "full_page_writes"):
        connection.execute(f"ALTER SYSTEM SET {option} = off")
    connection.execute("SELECT pg_reload_conf()")


def _drop_abandoned_databases(connection: psycopg.Connection) -> None:
    """Drop the databases of test processes that were killed."""
    for (name,) in connection.execute("SELECT datname FROM pg_database WHERE datname ~ '^test_[0-9]+'").fetchall():
        if not Path("/proc", name.split("_")[1]).exists():
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.fixture(scope="session")
def django_db_modify_db_settings(embedded: None, django_db_blocker: DjangoDbBlocker) -> None:
    """Create each process's database from a migrated template, which is kept until a migration changes."""
    servers, default = django_settings.EMBEDDED, django_settings.DATABASES["default"]
    template = f"template_{migrations.digest()}"
    with (
        (servers.var / "template.lock").open("w") as lock,
        psycopg.connect(
            host=str(servers.socket_dir), user="postgres", dbname="postgres", autocommit=True
        ) as connection,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'template\\_%'").fetchall()
        if (template,) not in names:
            for (name,) in names:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
            _create_template(f"new_{template}", django_db_blocker)
            connection.execute(f'ALTER DATABASE "new_{template}" RENAME TO "{template}"')
    default["TEST"]["TEMPLATE"] = template


def _create_template(name: str, blocker: DjangoDbBlocker) -> None:
    """Create a migrated database. Django connects to the database that it creates, so restore the settings."""
    names, tests = django_connection.settings_dict, django_connection.settings_dict["TEST"]
    name_before, test_name_before = names["NAME"], tests["NAME"]
    tests["NAME"] = name
    with blocker.unblock():
        django_connection.creation.create_test_db(verbosity=0, autoclobber=True, serialize=False)
        django_connection.close()
    names["NAME"], tests["NAME"] = name_before, test_name_before


@pytest.fixture(autouse=True)
def _temporary_roots(settings: Settings, tmp_path: Path) -> None:
    """Give each test empty folders for storage, runs and packages."""
    settings.TRAINYARD_STORAGE_ROOT = tmp_path / "storage"
    settings.TRAINYARD_RUNS_ROOT = tmp_path / "runs"
    settings.TRAINYARD_PACKAGES_ROOT = tmp_path / "packages"
    cluster.cache_clear()  # a cached backend has the folders of an earlier test


@pytest.fixture
def no_redis(settings: Settings) -> Iterator[None]:
    """A Redis that cannot be reached, as after `make up` has stopped it: its socket is gone."""
    settings.REDIS_URL = "unix:///nowhere/redis.sock?db=0"
    settings.CACHES = settings.CACHES | {"default": settings.CACHES["default"] | {"LOCATION": settings.REDIS_URL}}
    redis_client.client.cache_clear()
    yield
    redis_client.client.cache_clear()


@pytest.fixture(autouse=True)
def _default_language() -> None:
    """Start in the default language: Django's test client leaves that of its last request active."""
    translation.deactivate()


@pytest.fixture(autouse=True)
def _default_installation() -> None:
    """Have the operator's brand in memory, as in a process that runs for a while: pages make no query for it."""
    caches["template_fragments"].set(installation.CACHE_KEY, installation.Installation(), timeout=None)


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
def admin(client: Client, db: None) -> Client:
    """A browser in which `admin.user`, a superuser, is logged in."""
    client.user = UserFactory(is_staff=True, is_superuser=True)
    client.force_login(client.user)
    return client


@pytest.fixture
def api() -> Callable[[Membership | None], APIClient]:
    """`api(membership)` is an API client with a token of the member; `api(None)` is an anonymous one."""

    def client_of(membership: Membership | None = None) -> APIClient:
        client = APIClient()
        if membership is not None:
            _, secret = accounts.create_token(membership=membership, name="test")
            client.credentials(HTTP_AUTHORIZATION=f"Token {secret}")
        return client

    return client_of


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeBackend]:
    """A fake cluster."""
    fake = FakeBackend(root=tmp_path / "runs")
    monkeypatch.setattr("jobs.clusters.create", lambda _kind, **_options: fake)
    cluster.cache_clear()
    yield fake
    cluster.cache_clear()


@pytest.fixture
def customer(db: None, backend: FakeBackend) -> Customer:
    """A customer with an active service, money, a workspace and a script."""
    return Customer(backend)


@pytest.fixture
def sweeper(customer: Customer) -> Sweeper:
    """The customer, who buys sweeps."""
    return Sweeper(customer)


@pytest.fixture(scope="session")
def console_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An images root with the built image `pytorch` and a bare interpreter as BARE_IMAGE."""
    root = tmp_path_factory.mktemp("images")
    (root / "pytorch").symlink_to(image_folder("pytorch"))
    venv.create(root / BARE_IMAGE, with_pip=False, symlinks=True)
    venvs.mark_ready(root / BARE_IMAGE, "bare")
    return root


@pytest.fixture(scope="session")
def shared_console(
    request: pytest.FixtureRequest,
    short_folders: Callable[[], Path],
    tmp_path_factory: pytest.TempPathFactory,
    console_images: Path,
) -> Iterator[Console]:
    """A console of real processes on two cores, started once for flows and browser tests.

    Its package index has the package `alpha`. If a chosen test needs Slurm, runs on SLURM_SPEC go there.
    """
    index = Index(tmp_path_factory.mktemp("packages") / "index")
    index.add_wheel("alpha")
    settings = {"LOCAL_CPUS": "2", "LOCAL_MEMORY_MIB": "8192", "PACKAGE_INDEXES": index.address}
    with contextlib.ExitStack() as stack:
        chosen = [item for item in request.session.items if not item.get_closest_marker("skip")]
        has_slurm = not missing_program() and any("slurm_spec" in item.fixturenames for item in chosen)
        if has_slurm:
            slurm = stack.enter_context(contextlib.closing(SlurmCluster(short_folders(), nodes=2)))
            hpc = {"backend": "slurm", "conf": str(slurm.conf), "poll_seconds": 1}
            settings["TRAINYARD_CLUSTERS"] = json.dumps({"default": {"backend": "local"}, "hpc": hpc})
        for console in served(Console(short_folders(), console_images, **settings)):
            if has_slurm:
                console.query("UPDATE billing_nodespec SET cluster = 'hpc', cpus = 2 WHERE name = %s", SLURM_SPEC)
            yield console


def _make_ready(console: Console) -> None:
    """Start the shared console again if the test before failed while parts of it were killed."""
    if not console.is_ready():
        console.kill_all()
        console.up()


@pytest.fixture(scope="session")
def shared_buyer(shared_console: Console) -> Iterator[Buyer]:
    """A customer of the shared console with money in the wallet and scripts in the workspace."""
    _make_ready(shared_console)  # fixtures of the session come before `whole_console`
    with contextlib.closing(Buyer(shared_console)) as created:
        yield created


@pytest.fixture
def whole_console(shared_console: Console) -> Console:
    """The shared console, ready."""
    _make_ready(shared_console)
    return shared_console


@pytest.fixture
def buyer(whole_console: Console, shared_buyer: Buyer) -> Iterator[Buyer]:
    """The shared customer, whose runs end with the test."""
    shared_buyer.cancel_unfinished_jobs()  # in case the test before failed while the console was down
    for released in whole_console.workspace().glob("go-*"):
        released.unlink()  # a first try of this test may have released its runs, and this try must wait for its own
    yield shared_buyer
    if whole_console.is_ready():
        shared_buyer.cancel_unfinished_jobs()


@pytest.fixture
def slurm_spec(whole_console: Console) -> str:
    """The node spec whose runs go to Slurm; empty if Slurm is not installed."""
    return SLURM_SPEC if "TRAINYARD_CLUSTERS" in whole_console.settings else ""


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Stripe:
    """The payment provider behind the gateway, without a socket."""
    side = Stripe()
    monkeypatch.setattr(gateway, "_client", lambda: side.client)
    return side
