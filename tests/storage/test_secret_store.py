"""Secrets: written, never read, and encrypted in the database."""

import pytest
from django.urls import reverse

from console.accounts.models import AuditEvent
from runtime import environment
from storage import secret_store
from storage.models import Secret
from tests.storage.refusals import refused_fields

pytestmark = pytest.mark.django_db
VALUE = "s3cr3t-of-the-test"


def test_what_cannot_be_a_variable_is_refused_and_one_too_many(owner, monkeypatch):
    too_long = "ä" * (environment.MAX_SECRET_BYTES // 2 + 1)  # two bytes each
    for field, values in (("name", ("RANK", "1A", "A-B", "", "A" * 101)), ("value", ("", "\0", "\ud800", too_long))):
        for value in values:
            form = {"name": "A", "value": "x"} | {field: value}
            assert refused_fields(secret_store.save_secret, organization=owner.organization, **form) == [field], value
    assert not Secret.objects.exists()
    monkeypatch.setattr(secret_store, "MAX_SECRETS", 1)
    save = lambda name: refused_fields(secret_store.save_secret, organization=owner.organization, name=name, value="x")
    assert [save(name) for name in ("A", "A", "B")] == [[], [], ["name"]]  # a new value for A is no second secret


def test_a_value_is_written_changed_and_deleted_but_never_shown(api, owner, client):
    answers = [api(owner).put("/api/v1/secrets/API_TOKEN", {"value": VALUE}, format="json") for _time in range(2)]
    assert [answer.status_code for answer in answers] == [201, 200]
    row = Secret.objects.get()
    assert VALUE.encode() not in bytes(row.encrypted)
    assert secret_store.values_of(owner.organization, ["API_TOKEN"]) == {"API_TOKEN": VALUE}
    client.force_login(owner.user)
    form = {"name": "RANK", "value": VALUE}
    answers += [
        api(owner).get("/api/v1/secrets/"),
        api(owner).put("/api/v1/secrets/RANK", {"value": VALUE}, format="json"),
        client.get(reverse("secret_list")),
        client.post(reverse("secret_list"), form),  # refused: the form is shown again
    ]
    assert [answer.status_code for answer in answers[2:]] == [200, 400, 200, 200]
    assert not [answer for answer in answers if VALUE in answer.content.decode()]
    assert [entry.action for entry in AuditEvent.objects.filter(action__startswith="secret.").order_by("pk")] == [
        "secret.created", "secret.changed",
    ]  # fmt: skip
    assert not [entry for entry in AuditEvent.objects.all() if VALUE in str(vars(entry))]
    client.post(reverse("secret_delete", args=["API_TOKEN"]))
    assert client.post(reverse("secret_list"), {"name": "KEY", "value": "a\r\nb\r\n"}).status_code == 302
    # Browsers end the lines of a text field by \r\n.
    assert secret_store.values_of(owner.organization, ["KEY"]) == {"KEY": "a\nb\n"}
    assert client.post(reverse("secret_delete", args=["KEY"])).status_code == 302
    assert not Secret.objects.exists()
