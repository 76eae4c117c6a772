import pytest
import redis
from django.db import OperationalError

from console import health


def test_healthz_asks_nothing(client):
    client.cookies["sessionid"] = "something"
    response = client.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.django_db
def test_readyz_when_all_is_well(client):
    response = client.get("/readyz")
    assert response.json() == {"status": "ok", "checks": {"database": "ok", "migrations": "ok", "redis": "ok"}}


@pytest.mark.parametrize(("part", "error"), [("database", OperationalError), ("redis", redis.ConnectionError)])
def test_readyz_names_what_failed_and_no_more(client, monkeypatch, part, error):
    def fails():
        raise error("secret host")

    monkeypatch.setattr(health, "CHECKS", dict.fromkeys(health.CHECKS, lambda: "ok") | {part: fails})
    response = client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["checks"][part] == "unreachable"
    assert "secret host" not in response.content.decode()


def test_pending_migrations_are_not_ready(client, monkeypatch):
    monkeypatch.setattr(health, "CHECKS", {"migrations": lambda: "pending"})
    assert client.get("/readyz").status_code == 503
