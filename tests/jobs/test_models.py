"""Models of jobs: published with their lineage, used by a later run."""

import hashlib

import pytest
from django.utils import timezone

from console.core.errors import InvalidInput, NotFound
from jobs import model_publishing, orders, selectors
from jobs.errors import ChoiceUnavailable
from jobs.models import MetricPoint
from runtime.specs import Mount, Outcome
from storage import retention
from storage import selectors as storage
from storage.errors import InUse
from storage.models import Model
from tests.factories.jobs import start
from tests.factories.storage import DatasetFactory, DatasetVersionFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def trained(customer):
    """An ended job with a model among its outputs and a checkpoint."""
    dataset = DatasetFactory(organization=customer.organization, name="digits")
    DatasetVersionFactory(dataset=dataset, number=3)
    attempt = customer.started(datasets=["digits"], arguments=["--width", "8"])
    for folder, name in (("output_folder", "model.pt"), ("checkpoint_folder", "last.pt")):
        path = getattr(customer.backend, folder)(f"job-{attempt.job_id}")
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"weights")
    points = [("loss", 1, 0.9), ("loss", 3, 0.4), ("loss", 2, 0.2), ("accuracy", 1, 0.5)]  # stored out of order
    for name, step, value in points:
        MetricPoint.objects.create(
            job=attempt.job, attempt=1, name=name, step=step, position=step, value=value, at=timezone.now()
        )
    return customer.end(attempt, Outcome.COMPLETED)


def publish(customer, job, **changes):
    job = selectors.job_for(customer.organization, job.pk)
    values = {"name": "digits", "path": "outputs"} | changes
    return model_publishing.publish_model(job=job, user=customer.membership.user, **values)


def test_a_version_keeps_how_it_was_made(customer, trained):
    version = publish(customer, trained, path="outputs/model.pt")
    assert (storage.model_folder(version) / "model.pt").read_bytes() == b"weights"
    assert version.lineage == {
        "job": trained.pk, "job_name": "train.py", "path": "outputs/model.pt", "framework": "pytorch",
        "image": "pytorch", "workspace": customer.workspace.name, "code_path": "train.py",
        "arguments": ["--width", "8"], "epochs": 10, "lr": "0.01", "batch_size": 32,
        "script_sha256": hashlib.sha256(b"print('hello')\n").hexdigest(),
        "datasets": [{"name": "digits", "version": 3}], "models": [], "from_checkpoint": None,
        "metrics": {
            "loss": {"last": 0.4, "lowest": 0.2, "highest": 0.9},
            "accuracy": {"last": 0.5, "lowest": 0.5, "highest": 0.5},
        },
        "price_minor": selectors.receipt(trained).total_minor, "currency": "USD",
    }  # fmt: skip
    again = publish(customer, trained, path="/checkpoints//./last.pt")
    assert (again.number, again.lineage["path"]) == (2, "checkpoints/last.pt")


def test_a_path_must_name_outputs_or_checkpoints_of_a_job_of_the_organization(customer, other, trained):
    for path in ("", "logs/attempt-1", "outputs/none", "outputs/../x", "secrets", "outputs\0"):
        with pytest.raises(InvalidInput) as refused:
            publish(customer, trained, path=path)
        assert set(refused.value.fields) == {"path"}
    with pytest.raises(InvalidInput):
        publish(customer, customer.job())
    with pytest.raises(NotFound):
        publish(other, trained)


def test_a_quote_pins_the_versions_and_the_run_mounts_them(customer, trained):
    publish(customer, trained)
    publish(customer, trained, name="words")
    quote = customer.quote(models=["words", "digits@1"])
    publish(customer, trained, name="words")  # published after the quote: not what was priced
    job = customer.place(quote).job
    assert quote.purchase["resolved_models"] == ["words@1", "digits@1"]
    summary = selectors.summary(selectors.job_for(customer.organization, job.pk))
    assert summary["models"] == ["words@1", "digits@1"]
    start(job)
    attempt = job.attempts.get()
    spec = customer.backend.runs[attempt.run_name].spec
    assert spec.models == ("words", "digits")
    mounted = {mount.target: mount for mount in spec.mounts if mount.target.startswith("/models/")}
    version = storage.model_named(customer.organization, "digits").latest
    assert mounted["/models/digits"] == Mount(str(storage.model_folder(version)), "/models/digits", read_only=True)
    environment = selectors.environment(job)
    assert (environment["MODELS"], environment["MODELS_PATH"]) == ("words,digits", "/models")
    with pytest.raises(InUse, match=f"#{job.pk}"):
        retention.delete_model_version(version=version)
    assert customer.end(attempt, Outcome.COMPLETED).is_ended
    retention.delete_model_version(version=version)
    late = customer.quote(models=["words"])
    retention.delete_model_version(version=storage.model_named(customer.organization, "words").latest)
    with pytest.raises(ChoiceUnavailable):
        customer.place(late)
    rerun = orders.rerun(membership=customer.membership, job=job, changes={"models": ["words"]})
    assert rerun, "an earlier version is left"


@pytest.mark.parametrize("number", ["", "0" * 12 + "1", "-1", "x"])
def test_an_odd_version_number_deletes_nothing(api, customer, trained, number):
    publish(customer, trained)
    answer = api(customer.membership).delete(f"/api/v1/models/digits/?version={number}")
    assert (answer.status_code, list(answer.json()["fields"])) == (400, ["version"])
    assert storage.model_named(customer.organization, "digits").latest.number == 1


def test_wrong_models_are_reported_at_their_field(customer, other, trained):
    publish(customer, trained)
    # A text counts as a list of names, separated by commas.
    wrong = ("unknown", ["digits@9"], ["digits@x"], 5, ["digits", "digits@1"], ["digits@0"])
    for buyer, models in (*((customer, models) for models in wrong), (other, ["digits"])):
        assert list(buyer.refusals(models=models)) == ["models"], models
    Model.objects.create(organization=customer.organization, name="empty")
    assert "has no version" in customer.refusals(models=["empty"])["models"]
