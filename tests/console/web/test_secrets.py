"""Pages of secrets and registries, and both in the form of a training."""

import pytest
from django.urls import reverse

from storage import registries, secret_store
from storage.models import Registry

pytestmark = pytest.mark.django_db


def test_the_form_of_a_rerun_has_variables_and_names_of_secrets(customer, owner_page):
    for name in ("API_TOKEN", "OTHER"):
        secret_store.save_secret(organization=customer.organization, name=name, value="s3cr3t-of-the-test")
    form = customer.form() | {"environment": "NCCL_DEBUG=INFO\r\nB=2", "secrets": ["API_TOKEN"], "arguments": "$LR $$"}
    quoted = owner_page.post(reverse("training_quote"), form | {"touched": ""}).text
    assert reverse("training_order") in quoted
    job = customer.job(environment={"NCCL_DEBUG": "INFO", "B": "2"}, secrets=["API_TOKEN"], arguments="$LR $$")
    page = owner_page.get(reverse("training_new"), {"rerun": job.pk}).text
    assert ">B=2\nNCCL_DEBUG=INFO</textarea>" in page
    assert 'value="API_TOKEN" checked' in page
    assert 'value="OTHER">' in page
    assert "&#x27;$LR&#x27; &#x27;$$&#x27;" in page  # quoted as for a shell
    shown = owner_page.get(reverse("job_detail", args=[job.pk])).text
    assert "NCCL_DEBUG=INFO" in shown
    assert "API_TOKEN" in shown
    refused = owner_page.post(reverse("training_quote"), form | {"environment": "RANK=1", "touched": "environment"})
    assert "The platform sets RANK itself" in refused.text


def test_registries_are_edited_and_deleted_on_their_page(owner_page):
    path = reverse("registry_list")
    form = {"host": "a.example.com", "username": "me", "password": "hunter2-of-the-test"}
    assert owner_page.post(path, form).status_code == 302
    assert owner_page.post(path, form | {"username": "you", "password": ""}).status_code == 302
    saved = Registry.objects.get()
    assert (saved.username, registries.password_of(saved)) == ("you", "hunter2-of-the-test")
    page = owner_page.get(path, {"host": "a.example.com"}).text
    assert 'value="you"' in page
    assert "hunter2" not in page
    assert "Saved the credentials of the registry a.example.com" in owner_page.get(reverse("organization")).text
    assert owner_page.post(reverse("registry_delete", args=["a.example.com"])).status_code == 302
    assert owner_page.post(reverse("registry_delete", args=["a.example.com"])).status_code == 404
