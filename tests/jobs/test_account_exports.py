"""The archives of a person and of an organization: complete, readable, and without data of others."""

from __future__ import annotations

import csv
import io
import json
from zipfile import ZipFile

import pytest

from billing import selectors as billing
from console.accounts import services
from console.accounts.models import AuditEvent
from console.accounts.roles import Role
from console.core.zip_stream import CHUNK_BYTES, zip_stream
from jobs import account_exports
from jobs.models import MetricPoint
from runtime.specs import Outcome
from storage.models import Secret
from tests.factories.accounts import PASSWORD, MembershipFactory, logged_in

pytestmark = pytest.mark.django_db


def unpacked(chunks):
    """Return the texts of an archive by name, after its checksums were compared."""
    archive = ZipFile(io.BytesIO(b"".join(chunks)))
    assert archive.testzip() is None
    return {name: archive.read(name).decode() for name in archive.namelist()}


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_an_archive_is_made_in_parts_of_bounded_size():
    produced = 0

    def lines():
        nonlocal produced
        for number in range(40_000):
            produced += 1
            yield f"{number * 7919:x},{number * 104729:x}\n"

    stream = zip_stream([("a.csv", lines()), ("empty.csv", []), ("ü.txt", ["漢"])])
    first = next(stream)
    assert 0 < produced < 40_000, "the first part must not wait for all lines"
    rest = list(stream)
    assert max(map(len, [first, *rest])) < 4 * CHUNK_BYTES
    texts = unpacked([first, *rest])
    assert texts["a.csv"].count("\n") == 40_000
    assert (texts["empty.csv"], texts["ü.txt"]) == ("", "漢")


def test_an_owner_gets_the_organization_without_secrets(sweeper, customer, monkeypatch):
    sweep = sweeper.buy(trials=1)
    sweeper.finish(sweep)
    trial = sweep.trials.get()
    monkeypatch.setattr(account_exports, "BATCH_SIZE", 2)  # so that every table has several batches
    membership = customer.membership
    job = customer.end(customer.started(), Outcome.COMPLETED)
    for step in range(5):
        MetricPoint.objects.create(job=job, attempt=1, name="loss", step=step, value=-0.5, at=job.finished_at)
    _token, secret = services.create_token(membership=membership, name="=cmd()")  # a spreadsheet would run this formula
    Secret.objects.create(organization=membership.organization, name="KEY", encrypted=b"hidden-value")
    MembershipFactory(user__email="foreign@example.com")
    texts = unpacked(account_exports.export_organization(membership=membership))
    assert [row["email"] for row in rows(texts["members.csv"])] == [membership.user.email]
    jobs = sorted([str(trial.job_id), str(job.pk)])
    assert sorted(row["job"] for row in rows(texts["orders.csv"])) == jobs
    assert sorted(row["job"] for row in rows(texts["jobs.csv"])) == jobs
    [row] = rows(texts["sweeps.csv"])
    assert (row["id"], json.loads(row["purchase"])["sweep"]["trials"]) == (str(sweep.pk), 1)
    [row] = rows(texts["trials.csv"])
    assert (row["sweep"], row["job"], row["value"]) == (str(sweep.pk), str(trial.job_id), str(trial.value))
    assert [row["value"] for row in rows(texts["metrics.csv"]) if row["job"] == str(job.pk)] == ["-0.5"] * 5
    assert f"R-{job.order.hold.receipt.pk}" in {row["receipt"] for row in rows(texts["receipts.csv"])}
    wallet = [row for row in rows(texts["ledger.csv"]) if row["account"] == "wallet"]
    posted = billing.wallet(membership.organization).posted_minor
    assert sum(int(row["amount_minor"]) for row in wallet) == posted
    assert [row["name"] for row in rows(texts["tokens.csv"])] == ["'=cmd()"], "the apostrophe makes the formula a text"
    assert json.loads(texts["organization.json"])["secrets"] == ["KEY"]
    whole = "".join(texts.values())
    for hidden in (secret, services.token_digest(secret), "hidden-value", "foreign@example.com"):
        assert hidden not in whole
    assert AuditEvent.objects.filter(action="organization.exported", actor=membership.user).exists()


def test_a_person_gets_their_data_after_entering_the_password(customer):
    person = MembershipFactory(organization=customer.membership.organization, role=Role.VIEWER)
    _token, secret = services.create_token(membership=person, name="laptop")
    browser = logged_in(person.user)
    redirect = browser.get("/security/export/")
    browser.post(redirect.url, {"password": PASSWORD})
    texts = unpacked(browser.get("/security/export/").streaming_content)
    assert json.loads(texts["profile.json"])["email"] == person.user.email
    assert [row["role"] for row in rows(texts["memberships.csv"])] == ["viewer"]
    assert [row["name"] for row in rows(texts["tokens.csv"])] == ["laptop"]
    assert "token.created" in {row["action"] for row in rows(texts["audit.csv"])}
    whole = "".join(texts.values())
    for hidden in (secret, person.user.password, customer.membership.user.email):
        assert hidden not in whole
    assert browser.get("/organization/export/").status_code == 403, "a viewer may not export the organization"
