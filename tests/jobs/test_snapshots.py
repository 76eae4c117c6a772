"""What a job was ordered with is stored with the order, and compared with what a rerun would use now."""

import hashlib
import os

import pytest

from billing import pricebooks
from billing.pricing import PriceKind
from jobs import orders, reruns, snapshots
from jobs.errors import ChoiceUnavailable
from jobs.messages import event_sentence
from jobs.models import Job, Order, ScriptSnapshot
from storage import files, retention
from storage.models import Dataset
from tests.factories.jobs import start
from tests.factories.storage import DatasetFactory, DatasetVersionFactory

pytestmark = pytest.mark.django_db
FIRST, SECOND = "import torch\nprint(1)\n", "import torch\nprint(2)\n"


@pytest.fixture
def client(api, customer):
    return api(customer.membership)


def configuration(client, job):
    answer = client.get(f"/api/v1/jobs/{job.pk}/configuration/")
    assert answer.status_code == 200
    return answer.json()


def test_an_order_keeps_script_image_and_datasets_as_they_were(client, customer, backend):
    version = DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"))
    customer.write("train.py", FIRST)
    job = customer.job(arguments=["--seed", "1"], datasets=["digits"])
    data = configuration(client, job)
    assert data["script"] == FIRST
    assert data["script_sha256"] == hashlib.sha256(FIRST.encode()).hexdigest()
    assert (data["script_state"], data["diff"], data["changes"]) == ("unchanged", [], [])
    assert (data["arguments"], data["datasets"]) == (["--seed", "1"], [f"digits@{version.number}"])
    assert data["image_identity"] == "pytorch@sha256:1"

    customer.write("train.py", SECOND)
    later = DatasetVersionFactory(dataset=version.dataset)
    backend.image_digest = "sha256:2"
    data = configuration(client, job)
    assert data["script"] == FIRST
    assert data["script_state"] == "changed"
    assert [(line["sign"], line["text"]) for line in data["diff"] if line["sign"] in "+-"] == [
        ("-", "print(1)"), ("+", "print(2)"),
    ]  # fmt: skip
    assert data["changes"] == [
        "The script train.py has changed.",
        f"The dataset digits has version {later.number}; the job read version {version.number}.",
        "The image pytorch is another build now.",
    ]
    (customer.folder / "train.py").unlink()
    assert configuration(client, job)["script_state"] == "missing"


def test_changes_list_a_new_price_and_hide_later_versions_of_a_withdrawn_dataset(customer, other):
    dataset = DatasetFactory(organization=other.organization, name="public", is_public=True)
    version = DatasetVersionFactory(dataset=dataset)
    job = customer.job(datasets=["public"])
    assert reruns.changes(job) == []
    later = DatasetVersionFactory(dataset=dataset)
    shown = f"The dataset public has version {later.number}; the job read version {version.number}."
    assert reruns.changes(job) == [shown]
    Dataset.objects.filter(pk=dataset.pk).update(is_public=False)
    assert reruns.changes(job) == ["The dataset public is no longer available."]
    dearer = pricebooks.copy(book=job.order.quote.book)
    dearer.prices.filter(kind=PriceKind.NODE_HOUR).update(amount="12.5")
    pricebooks.publish(book=dearer)
    (sentence,) = (change for change in reruns.changes(job) if "node-hour" in change)
    assert "costs $0.125; it was $" in sentence
    assert other.job().script != job.script, "equal scripts of two organizations are stored twice"


def test_a_large_script_has_a_hash_and_a_huge_one_no_snapshot(client, customer):
    text = "#" * (files.TEXT_LIMIT + 1)
    customer.write("train.py", text)
    job = customer.job()
    data = configuration(client, job)
    assert (data["script"], data["script_sha256"]) == (None, hashlib.sha256(text.encode()).hexdigest())
    os.truncate(customer.folder / "train.py", snapshots.HASH_LIMIT + 1)
    assert configuration(client, job)["script_state"] == "changed"
    job = customer.job()
    assert job.script is None
    assert configuration(client, job)["script_state"] == "unknown"


SWAPS = [lambda script, secret: script.symlink_to(secret), lambda script, _secret: os.mkfifo(script)]


@pytest.mark.parametrize("swap", SWAPS, ids=["link", "pipe"])
def test_a_script_that_is_swapped_before_the_order_is_not_read(customer, swap, monkeypatch, tmp_path):
    """Customers' code writes in the workspace while its next run is bought."""
    quote = customer.quote()
    script, secret = customer.folder / "train.py", tmp_path / "secret"
    secret.write_text("secret")
    parse = orders.parse

    def then_swap(**options):
        purchase = parse(**options)
        script.unlink()
        swap(script, secret)
        return purchase

    monkeypatch.setattr(orders, "parse", then_swap)
    with pytest.raises(ChoiceUnavailable) as refused:
        customer.place(quote)
    assert set(refused.value.fields) == {"code_path"}
    assert not Order.objects.exists()
    assert not ScriptSnapshot.objects.exists()


# --- Exact reruns -----------------------------------------------------------------------------------------------------


@pytest.fixture
def original(customer):
    """A job whose script is in a folder, with a dataset; since then the script and the dataset have changed."""
    version = DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"), number=1)
    customer.write("src/train.py", FIRST)
    job = customer.job(code_path="src/train.py", datasets=["digits"], arguments=["--seed", "1"], tags=["kept"])
    customer.write("src/train.py", SECOND)
    DatasetVersionFactory(dataset=version.dataset, number=2)
    return job


def submitted(customer, job):
    """Submit a job; return its RunSpec, and the text of the script that the run executes."""
    assert start(job)
    spec = customer.backend.runs[f"job-{job.pk}-1"].spec
    return spec, (customer.folder / spec.script).read_text()


def test_an_exact_rerun_runs_the_script_and_data_of_the_order(client, customer, original, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("outside")
    customer.quota(max_running_nodes=100)
    # Each spelling of true, with what the customer does to the copy of the script before the start.
    damages = {
        "1": lambda copy: copy.write_text(SECOND),
        "True": lambda copy: copy.symlink_to(outside),
        "yes": os.mkfifo,
        "on": lambda _copy: (customer.folder / "src/train.py").unlink(),
    }
    for true, damage in damages.items():
        answer = client.post(f"/api/v1/jobs/{original.pk}/rerun/", {"exact": true, "nodes": 1})
        assert answer.status_code == 201
        job = Job.objects.get(pk=answer.json()["job"])
        copy = customer.folder / snapshots.script_path(job)
        copy.unlink(missing_ok=True)
        damage(copy)
        spec, text = submitted(customer, job)
        assert (text, spec.arguments, spec.nodes) == (FIRST, ("--seed", "1"), 1)
        assert spec.script == f"src/train.{original.script.sha256[:12]}.py"
        assert not copy.is_symlink()
        assert outside.read_text() == "outside"
        assert [version.number for version in job.dataset_versions.all()] == [1]
        assert (job.code_path, job.code_key, job.tags) == ("src/train.py", original.code_key, ["kept"])
    again = client.post(f"/api/v1/jobs/{job.pk}/rerun/", {"exact": True}).json()["job"]
    assert Job.objects.get(pk=again).script == original.script
    assert ScriptSnapshot.objects.count() == 1, "equal scripts are stored once"


def test_a_job_runs_the_script_of_its_order_though_it_was_changed_while_it_waited(client, customer):
    script = customer.folder / "src/train.py"
    for change in (lambda: script.write_text(SECOND), script.unlink):
        customer.write("src/train.py", FIRST)
        job = customer.job(code_path="src/train.py")
        change()
        spec, text = submitted(customer, job)
        assert (spec.script, text) == (f"src/train.{job.script.sha256[:12]}.py", FIRST)
        (event,) = job.events.filter(kind="runs_snapshot")
        assert "The script src/train.py was changed after the order." in event_sentence(event.kind, event.data)
        assert configuration(client, job)["runs_snapshot"] is True


def test_a_rerun_that_is_not_exact_runs_the_latest_script_and_data(client, customer, original):
    exact = client.post(f"/api/v1/jobs/{original.pk}/rerun/", {"exact": True}).json()["job"]
    for earlier in (original.pk, exact):
        body = {"code_path": "src/train.py"}
        job = Job.objects.get(pk=client.post(f"/api/v1/jobs/{earlier}/rerun/", body).json()["job"])
        spec, text = submitted(customer, job)
        assert (spec.script, text) == ("src/train.py", SECOND)
        assert [version.number for version in job.dataset_versions.all()] == [2]


def test_what_an_exact_rerun_keeps_cannot_be_changed(client, customer, original, other):
    path = f"/api/v1/jobs/{original.pk}/rerun/"
    changes = {"code_path": "train.py", "datasets": ["digits@2"], "epochs": 99, "arguments": ["--seed", "2"]}
    answer = client.post(path, {"exact": True, **changes})
    assert (answer.status_code, set(answer.json()["fields"])) == (400, set(changes))
    same = {"exact": "true", "code_path": "src/train.py", "name": "again", "max_seconds": 600}
    job = Job.objects.get(pk=client.post(path, same).json()["job"])
    assert (job.name, job.deadline_seconds) == ("again", 600)
    form = customer.form(exact=True)
    for wrong in (other.job().pk, None, "1", 2**63, True):
        answer = client.post("/api/v1/quotes/", form | {"rerun_of": wrong})
        assert (answer.status_code, set(answer.json()["fields"])) == (400, {"rerun_of"})


def test_what_cannot_be_repeated_exactly_is_refused(client, customer, original):
    path = f"/api/v1/jobs/{original.pk}/rerun/"

    def refusal():
        answer = client.post(path, {"exact": True})
        assert answer.status_code == 400
        return answer.json()["fields"]

    orders.cancel_job(membership=customer.membership, job=original)  # an open job would keep its dataset
    retention.delete_version(version=original.dataset_versions.get())
    assert set(refusal()) == {"datasets"}
    ScriptSnapshot.objects.update(content=None)
    assert "is not stored" in refusal()["rerun_of"]
    retention.delete_workspace(workspace=customer.workspace)
    assert "was deleted" in refusal()["rerun_of"]


def test_a_copy_that_cannot_be_written_ends_the_run_before_it_costs_anything(client, customer, original):
    pk = client.post(f"/api/v1/jobs/{original.pk}/rerun/", {"exact": True}).json()["job"]
    (customer.folder / snapshots.script_path(Job.objects.get(pk=pk))).mkdir()
    assert not start(Job.objects.get(pk=pk))
    job = Job.objects.get(pk=pk)
    assert (job.state, job.attempts.get().failure["data"]) == ("failed", {"field": "script"})
    assert job.order.hold.metered_minor == 0
