import re
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import redis
from django.db import OperationalError
from django.utils import timezone

from console.operations import health, signs, store
from jobs.models import ClusterStatus
from tests.factories.accounts import UserFactory


@pytest.fixture
def all_alive(shared):
    """Every process has just given its sign."""
    for kind, part in ((signs.BEAT, ""), (signs.WORKER, ""), (signs.WATCHER, "default")):
        signs.give(kind, part)
    return shared


def status_of(response, check):
    return {line["check"]: line["status"] for line in response.json()["checks"]}[check]


def last_heard(kind, part, seconds):
    """A sign as it is when its process has been silent for so long."""
    signs._not_before.clear()
    signs.give(kind, part)
    [name] = [name for name in store.client().hkeys(store.key("signs")) if f'"{kind}"'.encode() in name]
    at = signs.newest(signs.seen(), kind)[part].at - seconds
    store.client().hset(store.key("signs"), name, f'{{"at": {at}}}')


def test_healthz_asks_nothing(client):
    client.cookies["sessionid"] = "something"
    response = client.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.django_db
def test_readyz_when_all_is_well(client, all_alive):
    response = client.get("/readyz")
    assert response.status_code == 200
    checks = [{"check": check, "part": "", "status": "ok"} for check in ("database", "migrations", "redis", "storage")]
    checks += [{"check": check, "part": "", "status": "ok"} for check in ("beat", "worker")]
    checks += [{"check": check, "part": "default", "status": "ok"} for check in ("watcher", "cluster")]
    assert response.json() == {"status": "ok", "checks": checks}


@pytest.mark.django_db
@pytest.mark.parametrize(("part", "error"), [("database", OperationalError), ("redis", redis.ConnectionError)])
def test_readyz_names_what_failed_and_no_more(client, monkeypatch, all_alive, part, error):
    def fails():
        raise error("secret host")

    monkeypatch.setitem(health.HERE, part, fails)
    response = client.get("/readyz")
    assert (response.status_code, response.json()["status"]) == (503, "not_ready")
    assert status_of(response, part) == "failed"
    assert "secret host" not in response.content.decode()


@pytest.mark.django_db
def test_without_redis_the_process_is_not_ready_and_says_what_cannot_be_known(client, away):
    response = client.get("/readyz")
    assert response.status_code == 503
    found = {line["check"]: line["status"] for line in response.json()["checks"]}
    assert found["redis"] == "failed"
    assert {found[kind] for kind in ("beat", "worker", "watcher")} == {"degraded"}


@pytest.mark.django_db
def test_pending_migrations_are_not_ready(client, monkeypatch, all_alive):
    monkeypatch.setattr(health, "_migrated_at", {})
    monkeypatch.setattr(health.MigrationExecutor, "migration_plan", lambda *_: [("one", False)])
    response = client.get("/readyz")
    assert (response.status_code, status_of(response, "migrations")) == (503, "failed")


@pytest.mark.django_db
def test_storage_that_cannot_be_written_is_not_ready(client, settings, all_alive, tmp_path):
    assert client.get("/readyz").status_code == 200
    assert not list(Path(settings.TRAINYARD_STORAGE_ROOT, ".health").iterdir())
    shutil.rmtree(settings.TRAINYARD_RUNS_ROOT)
    Path(settings.TRAINYARD_RUNS_ROOT).write_text("a file where the folder was")
    response = client.get("/readyz")
    assert (response.status_code, status_of(response, "storage")) == (503, "failed")


@pytest.mark.django_db
@pytest.mark.parametrize(("kind", "part"), [("beat", ""), ("worker", ""), ("watcher", "default")])
def test_a_process_that_fell_silent_degrades_and_pages_are_still_served(client, all_alive, kind, part):
    last_heard(kind, part, health.LATE_SECONDS[kind] + 1)
    response = client.get("/readyz")
    assert (response.status_code, response.json()["status"]) == (200, "degraded")
    assert [line["check"] for line in response.json()["checks"] if line["status"] != "ok"] == [kind]


@pytest.mark.django_db
def test_a_cluster_that_is_away_degrades_and_only_operators_read_why(client, settings, all_alive):
    now = timezone.now()
    ClusterStatus.objects.create(
        name="default", answers=False, since=now - timedelta(minutes=1), checked_at=now, detail="10.0.0.7 is away"
    )
    response = client.get("/readyz")
    assert (response.status_code, response.json()["status"]) == (200, "degraded")
    assert status_of(response, "cluster") == "degraded"
    assert "10.0.0.7" not in response.content.decode()
    settings.METRICS_TOKEN = "of-the-operator"
    assert "10.0.0.7" in client.get("/readyz", headers={"Authorization": "Bearer of-the-operator"}).content.decode()
    assert "10.0.0.7" not in client.get("/readyz", headers={"Authorization": "Bearer guessed"}).content.decode()


@pytest.mark.django_db
def test_isolation_gaps_are_for_the_staff(client, all_alive):
    signs.give(signs.CLUSTER, "default", gaps=["Runs share this machine's network."])
    client.force_login(UserFactory())
    assert "isolation_gaps" not in client.get("/readyz").json()
    client.force_login(UserFactory(is_staff=True))
    assert client.get("/readyz").json()["isolation_gaps"] == {"default": ["Runs share this machine's network."]}
    assert "Runs share this machine" in client.get("/admin/").content.decode()


@pytest.mark.django_db
def test_the_admin_says_what_is_wrong_first_of_all(client, all_alive):
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    assert "Workers" not in client.get("/admin/").content.decode()
    last_heard(signs.WORKER, "", 3600)
    page = client.get("/admin/").content.decode()
    assert "Workers" in page
    assert re.search(r"36\d\d seconds ago", page)


@pytest.mark.django_db
def test_probes_come_by_address_and_without_a_name(client, all_alive):
    assert client.get("/healthz", headers={"Host": "10.1.2.3:8000"}).status_code == 200
    assert client.get("/readyz", headers={"Host": "10.1.2.3:8000"}).status_code == 200
    assert client.get("/", headers={"Host": "10.1.2.3:8000"}).status_code == 400
