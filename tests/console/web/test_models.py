"""Pages of models: publish a job's result, use it in a training, and delete and restore it."""

import pytest
from django.urls import reverse

from jobs.models import Job
from runtime.specs import Outcome
from storage import selectors as storage
from tests.factories.storage import ModelVersionFactory


@pytest.fixture
def trained(customer):
    """An ended job with a result."""
    attempt = customer.started()
    folder = customer.backend.output_folder(f"job-{attempt.job_id}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.pt").write_bytes(b"weights")
    return customer.end(attempt, Outcome.COMPLETED)


def test_the_result_of_a_job_is_published_and_used(trained, owner_page):
    Job.objects.update(lr="0.009588033884144332")
    page = owner_page.get(reverse("job_publish", args=[trained.pk])).content.decode()
    assert '<option value="outputs/model.pt">' in page
    refused = owner_page.post(reverse("job_publish", args=[trained.pk]), {"path": "outputs/none", "name": "net"})
    assert "This job has no file or folder at this path." in refused.content.decode()
    answer = owner_page.post(reverse("job_publish", args=[trained.pk]), {"path": "outputs", "name": "net"}, follow=True)
    page = answer.content.decode()
    assert "How version 1 was made" in page
    assert "learning rate 0.00958803," in page
    assert f"#{trained.pk} train.py" in page
    assert "net@1" in owner_page.get(reverse("job_detail", args=[trained.pk])).content.decode()
    form = owner_page.get(reverse("training_new"), {"models": "net@1", "from_checkpoint": trained.pk}).content.decode()
    assert '<option value="net@1" selected>' in form
    assert f'<option value="{trained.pk}" selected>' in form


def test_the_form_sends_models_and_refuses_a_job_without_checkpoints(customer, trained, owner_page):
    ModelVersionFactory(model__organization=customer.organization, model__name="net")
    form = customer.form(models=["", "net"], from_checkpoint=trained.pk, touched="from_checkpoint", max_seconds="")
    page = owner_page.post(reverse("training_quote"), form).content.decode()
    assert f"Job #{trained.pk} has no checkpoints." in page
    page = owner_page.post(reverse("training_quote"), form | {"from_checkpoint": ""}).content.decode()
    assert "Quote" in page
    assert customer.organization.quotes.latest("created_at").purchase["resolved_models"] == ["net@1"]


def test_a_model_is_deleted_and_restored_with_its_last_version(customer, owner_page):
    version = ModelVersionFactory(model__organization=customer.organization, model__name="net")
    answer = owner_page.post(reverse("model_version_delete", args=["net", 1]), follow=True)
    assert answer.redirect_chain == [(reverse("model_list"), 302)]
    page = owner_page.get(reverse("storage_usage")).content.decode()
    assert "Model version" in page
    owner_page.post(reverse("storage_restore", args=["models", version.pk]))
    assert storage.model_named(customer.organization, "net").latest == version
