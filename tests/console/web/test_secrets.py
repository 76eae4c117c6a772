"""Pages of secrets and registries, and both in the form of a training."""

import pytest
from django.urls import reverse

from console.accounts.roles import Role
from storage import registries, secret_store
from storage.models import Registry, Secret
from tests.factories.accounts import MembershipFactory

pytestmark = pytest.mark.django_db


def test_the_form_of_a_rerun_has_variables_and_names_of_secrets(customer, owner_page):
    for name in ("API_TOKEN", "OTHER"):
        secret_store.save_secret(organization=customer.organization, name=name, value="s3cr3t-of-the-test")
    form = customer.form() | {"environment": "NCCL_DEBUG=INFO\r\nB=2", "secrets": ["API_TOKEN"], "arguments": "$LR $$"}
    quoted = owner_page.post(reverse("training_quote"), form | {"touched": ""}).content.decode()
    assert reverse("training_order") in quoted
    job = customer.job(environment={"NCCL_DEBUG": "INFO", "B": "2"}, secrets=["API_TOKEN"], arguments="$LR $$")
    page = owner_page.get(reverse("training_new"), {"rerun": job.pk}).content.decode()
    assert ">B=2\nNCCL_DEBUG=INFO</textarea>" in page
    assert 'value="API_TOKEN" checked' in page
    assert 'value="OTHER">' in page
    assert "&#x27;$LR&#x27; &#x27;$$&#x27;" in page  # quoted as for a shell
    shown = owner_page.get(reverse("job_detail", args=[job.pk])).content.decode()
    assert "NCCL_DEBUG=INFO" in shown
    assert "API_TOKEN" in shown
    refused = owner_page.post(reverse("training_quote"), form | {"environment": "RANK=1", "touched": "environment"})
    assert "The platform sets RANK itself" in refused.content.decode()


def test_members_who_may_not_store_see_names_only(customer, client):
    secret_store.save_secret(organization=customer.organization, name="API_TOKEN", value="s3cr3t")
    registries.save_registry(organization=customer.organization, host="a.example.com", username="me", password="pw")
    client.force_login(MembershipFactory(organization=customer.organization, role=Role.VIEWER).user)
    for path, form, shown in (
        (reverse("secret_list"), {"name": "B", "value": "x"}, "API_TOKEN"),
        (reverse("registry_list"), {"host": "b.example.com", "username": "x"}, "a.example.com"),
    ):
        page = client.get(path).content.decode()
        assert shown in page
        assert "<textarea" not in page
        assert client.post(path, form).status_code == 403
    assert client.post(reverse("secret_delete", args=["API_TOKEN"])).status_code == 403
    assert client.post(reverse("registry_delete", args=["a.example.com"])).status_code == 403
    assert (Secret.objects.count(), Registry.objects.count()) == (1, 1)


def test_registries_are_edited_and_deleted_on_their_page(customer, owner_page):
    path = reverse("registry_list")
    form = {"host": "a.example.com", "username": "me", "password": "hunter2-of-the-test"}
    assert owner_page.post(path, form).status_code == 302
    assert owner_page.post(path, form | {"username": "you", "password": ""}).status_code == 302
    saved = Registry.objects.get()
    assert (saved.username, registries.password_of(saved)) == ("you", "hunter2-of-the-test")
    page = owner_page.get(path, {"host": "a.example.com"}).content.decode()
    assert 'value="you"' in page
    assert "hunter2" not in page
    assert (
        "Saved the credentials of the registry a.example.com"
        in owner_page.get(reverse("organization")).content.decode()
    )
    assert owner_page.post(reverse("registry_delete", args=["a.example.com"])).status_code == 302
    assert owner_page.post(reverse("registry_delete", args=["a.example.com"])).status_code == 404
