"""`/healthz`, `/readyz` and the health panel of the admin."""

import json
import re
import shutil
import time
from datetime import timedelta
from pathlib import Path

import pytest
import redis
from django.db import OperationalError
from django.utils import timezone

from console.monitoring import health
from console.observability import heartbeats, redis_client
from jobs.models import ClusterStatus
from tests.factories.accounts import UserFactory

pytestmark = pytest.mark.django_db
PROCESSES = [("beat", ""), ("worker", ""), ("worker", "dispatch"), ("watcher", "default")]
"""Kind and part of each heartbeat that is expected: the dispatcher is a worker, and a watcher's part is its cluster."""


@pytest.fixture(autouse=True)
def _checks_are_not_repeated(monkeypatch):
    monkeypatch.setattr(health, "REUSE_SECONDS", 0.0)


@pytest.fixture
def all_alive(redis_keys):
    """Every process has just sent a heartbeat."""
    for kind, part in PROCESSES:
        heartbeats.send(kind, part)


def ready(client, **headers):
    """Return the status code, the status and the checks that are not ok."""
    answer = client.get("/readyz", headers=headers)
    body = answer.json()
    wrong = {line["check"]: line["status"] for line in body["checks"] if line["status"] != "ok"}
    return answer.status_code, body["status"], wrong


def silence(kind, part, seconds):
    """Date a process's last heartbeat back."""
    signs = redis_client.key("signs")  # a hash, whose field names are JSON lists that begin with kind and part
    at = heartbeats.latest(heartbeats.recent(), kind)[part].at - seconds
    prefix = json.dumps([kind, part])[:-1].encode()
    [name] = [name for name in redis_client.client().hkeys(signs) if name.startswith(prefix)]
    redis_client.client().hset(signs, name, f'{{"at": {at}}}')


@pytest.mark.usefixtures("all_alive")
def test_probes_of_a_healthy_console_succeed_and_may_use_its_ip_address(client, django_assert_num_queries):
    client.cookies["sessionid"] = "something"
    with django_assert_num_queries(0):  # the session is not read
        assert client.get("/healthz").json() == {"status": "ok"}
    del client.cookies["sessionid"]
    assert client.get("/healthz", headers={"Host": "10.1.2.3:8000"}).json() == {"status": "ok"}
    answer = client.get("/readyz", headers={"Host": "10.1.2.3:8000"})
    checks = [(check, "") for check in ("database", "migrations", "redis", "storage")]
    checks += [*PROCESSES, ("cluster", "default")]
    shown = [{"check": check, "part": part, "status": "ok"} for check, part in checks]
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "checks": shown})
    assert not list(Path(health.settings.TRAINYARD_STORAGE_ROOT, ".health").iterdir())  # the check deletes its file
    assert client.get("/", headers={"Host": "10.1.2.3:8000"}).status_code == 400  # pages need a host of ALLOWED_HOSTS


@pytest.mark.usefixtures("all_alive")
def test_a_flood_of_probes_repeats_the_results_of_the_last_checks(client, monkeypatch):
    monkeypatch.setattr(health, "REUSE_SECONDS", float("inf"))
    monkeypatch.setattr(health, "_recent_results", {})
    checked = []
    monkeypatch.setitem(health.OWN_CHECKS, "storage", lambda: checked.append("storage") or "")
    assert {ready(client)[0] for _ in range(3)} == {200}
    assert checked == ["storage"]


def _fails_with(check, error):
    def fails():
        raise error("secret host")

    return lambda monkeypatch, _settings: monkeypatch.setitem(health.OWN_CHECKS, check, fails)


def _database_goes_away(monkeypatch, settings):
    """Shortly after the schema was found up to date."""
    monkeypatch.setitem(health._migrated_at, "default", time.monotonic())
    _fails_with("database", OperationalError)(monkeypatch, settings)
    monkeypatch.setattr(health, "_check_clusters", health.OWN_CHECKS["database"])


def _has_pending_migrations(monkeypatch, _settings):
    monkeypatch.setattr(health, "_migrated_at", {})  # a process remembers for a while that there were none
    monkeypatch.setattr(health.MigrationExecutor, "migration_plan", lambda *_: [("one", False)])


def _cannot_write(_monkeypatch, settings):
    shutil.rmtree(settings.TRAINYARD_RUNS_ROOT, ignore_errors=True)
    Path(settings.TRAINYARD_RUNS_ROOT).write_text("a file in place of the folder")


@pytest.mark.usefixtures("all_alive")
@pytest.mark.parametrize(
    ("check", "break_it"),
    [
        ("database", _database_goes_away),
        ("redis", _fails_with("redis", redis.ConnectionError)),
        ("migrations", _has_pending_migrations),
        ("storage", _cannot_write),
    ],
)
def test_a_process_that_cannot_work_is_not_ready(client, monkeypatch, settings, check, break_it):
    break_it(monkeypatch, settings)
    code, status, wrong = ready(client)
    assert (code, status, wrong[check]) == (503, "not_ready", "failed")
    assert "secret host" not in client.get("/readyz").content.decode()


@pytest.mark.usefixtures("no_redis")
def test_without_redis_the_state_of_other_processes_is_unknown(client):
    unknown = dict.fromkeys(("beat", "worker", "watcher"), "degraded")
    assert ready(client) == (503, "not_ready", {"redis": "failed"} | unknown)


@pytest.mark.usefixtures("all_alive")
def test_a_process_without_heartbeats_degrades_the_console(client):
    for kind, part in PROCESSES:
        silence(kind, part, health.LATE_SECONDS[kind] + 1)
        assert ready(client) == (200, "degraded", {kind: "degraded"})
        heartbeats._next_at.clear()  # so that the next heartbeat is due at once
        heartbeats.send(kind, part)


@pytest.mark.usefixtures("all_alive")
def test_only_operators_read_why_a_cluster_does_not_answer(client, settings):
    settings.METRICS_TOKEN = "of-the-operator"
    now = timezone.now()
    ClusterStatus.objects.create(
        name="default", answers=False, since=now - timedelta(minutes=1), checked_at=now, detail="10.0.0.7 is away"
    )
    assert ready(client) == (200, "degraded", {"cluster": "degraded"})
    for token, reads in (("", False), ("guessed", False), ("of-the-operator", True)):
        answer = client.get("/readyz", headers={"Authorization": f"Bearer {token}"})
        assert ("10.0.0.7" in answer.content.decode()) == reads


@pytest.mark.usefixtures("all_alive")
def test_only_staff_read_isolation_gaps(client):
    gap = "Runs share this machine's network."
    heartbeats.send(heartbeats.CLUSTER, "default", gaps=[gap])
    client.force_login(UserFactory())
    assert "isolation_gaps" not in client.get("/readyz").json()
    client.force_login(UserFactory(is_staff=True))
    assert client.get("/readyz").json()["isolation_gaps"] == {"default": [gap]}
    assert "Runs share this machine" in client.get("/admin/").content.decode()


@pytest.mark.usefixtures("all_alive")
def test_the_first_page_of_the_admin_says_what_is_wrong(client):
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    assert "Workers" not in client.get("/admin/").content.decode()
    silence(heartbeats.WORKER, "", 3600)
    page = client.get("/admin/").content.decode()
    assert "Workers" in page
    assert re.search(r"36\d\d seconds ago", page)
