"""Explanations of failed jobs, by page and API. `tests/browser/test_diagnoses.py` has a job of each family."""

import re
from decimal import Decimal

import redis
from django.urls import reverse

from billing import pricebooks
from billing.models import PriceBook
from billing.pricing import PriceKind
from console.core import optional_cache
from jobs import failures, selectors
from runtime.specs import Outcome
from storage import selectors as storage
from tests.factories.billing import NodeSpecFactory, PriceFactory
from tests.factories.jobs import Customer
from tests.factories.storage import DatasetFactory, DatasetVersionFactory, ModelVersionFactory

TRACEBACK = """Traceback (most recent call last):
  File "/workspace/train.py", line 3, in <module>
    {line}
{error}
"""


def failed(customer, error, line="main()", *, outcome=Outcome.CODE_FAILED, rank=1, **purchase):
    """Return a job whose `rank` raised the error, at the end of a long log. Rank 0 only lost its connection to it."""
    attempt = customer.started(**purchase)
    customer.backend.write(attempt.run_name, "x" * 99_999 + TRACEBACK.format(line=line, error=error), rank=rank)
    customer.backend.write(attempt.run_name, "RuntimeError: Connection closed by peer", rank=0)
    return selectors.job_for(customer.organization, customer.end(attempt, outcome, rank=rank).pk)


def page_of(client, job):
    page = client.get(reverse("job_detail", args=[job.pk])).content.decode()
    return re.sub(r"\s+", " ", page[page.index('id="diagnosis"') : page.index("</section>")])


def test_a_failed_job_opens_on_its_diagnosis(customer, owner_page, api):
    job = failed(customer, "ModuleNotFoundError: No module named 'cv2'", "import cv2  # <script>", code_path="train.py")
    page = page_of(owner_page, job)
    for words in (
        "The module cv2 is not installed.", "opencv-python-headless", "/workspace/train.py, line 3",
        "import cv2 # &lt;script&gt;", "ModuleNotFoundError: No module named &#x27;cv2&#x27;",
        "Root cause: rank 1 on node 1", "you pay for the time used",
        f'href="{reverse("workspace_file", args=["main", "requirements.txt"])}?new=1"',
    ):  # fmt: skip
        assert words in page, words
    answer = api(customer.membership).get(reverse("api_job_diagnosis", args=[job.pk])).json()
    seen = [answer[name] for name in ("cause", "rank", "line", "code", "is_billed")]
    assert [*seen, answer["fix"]["kind"]] == ["missing_module", 1, 3, "import cv2 # <script>", True, "requirements"]
    customer.backend.available = False  # the diagnosis is stored, so it needs no cluster
    assert failures.explain(job).diagnosis.cause == "missing_module"
    theirs = Customer(customer.backend)
    assert api(theirs.membership).get(reverse("api_job_diagnosis", args=[job.pk])).status_code == 404
    assert failures.explain(customer.job()) is None  # it waits in the queue


def test_a_diagnosis_without_the_log_or_the_cache_is_made_again(customer, monkeypatch):
    job = failed(customer, "ModuleNotFoundError: No module named 'cv2'", "import cv2")
    customer.backend.available = False
    assert failures.explain(job).diagnosis.cause != "missing_module"
    customer.backend.available = True
    assert failures.explain(job).diagnosis.cause == "missing_module"

    def away(*_arguments):
        raise redis.ConnectionError

    for name in ("get", "set"):
        monkeypatch.setattr(optional_cache.cache, name, away)
    assert failures.explain(job).diagnosis.cause == "missing_module"


def test_a_missing_file_is_explained_with_similar_names_in_its_folder_and_none_outside(customer, owner_page):
    version = DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"))
    for name in ("train.csv", "test.csv"):
        (storage.version_folder(version) / name).write_text("1")
    model = ModelVersionFactory(model__organization=customer.organization, model__name="resnet")
    (storage.model_folder(model) / "weights.pt").write_text("1")
    customer.write("data/labels.csv", "1")
    for name in ("a", "b", "c" * 120):
        customer.write(f"many/{name}", "1")
    for path, folder, similar in (  # "" and None: nothing outside the customer's data may be listed
        ("/datasets/digits/trian.csv", "/datasets/digits", "train.csv"),
        ("/datasets/digits/no/such/train.csv", "/datasets/digits", "test.csv"),
        ("/datasets/digits/../../../../etc/passwd", "", None),
        ("/datasets/digit/train.csv", "/datasets", "digits"),
        ("/datasets2/digits/train.csv", "", None),
        ("/models/resnet/wieghts.pt", "/models/resnet", "weights.pt"),
        ("/models/resnt/weights.pt", "/models", "resnet"),
        ("data/lables.csv", "/workspace/data", "labels.csv"),
        ("/workspace/data/x.csv", "/workspace/data", "labels.csv"),
        ("../../../secret", "", None),
        ("/etc/shadow", "", None),
        ("many/" + "c" * 119, "/workspace/many", "c" * 120),
    ):
        error = f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'"
        job = failed(customer, error, datasets="digits", models="resnet")
        found = failures.explain(job)
        assert (found.diagnosis.cause, found.folder) == ("missing_file", folder), path
        assert (similar in found.suggestions) if similar else found.suggestions == [], path
    assert "diagnosis-similar" in page_of(owner_page, job)
    assert found.suggestions == ["c" * 120, "a", "b"]  # of the last path: the long name once and in full


def test_the_cheapest_larger_node_that_takes_the_processes_is_offered(customer):
    draft = pricebooks.copy(book=PriceBook.objects.get())
    slow = NodeSpecFactory(name="slow", cpus=Decimal("0.5"), memory_mib=65_536)
    dear = NodeSpecFactory(name="dear", cpus=64, memory_mib=131_072)
    for spec, amount in ((slow, 1), (dear, 99_999)):
        PriceFactory(book=draft, node_spec=spec, amount=amount)
        # A book is published only if a product at a fixed price has one for each node spec.
        PriceFactory(book=draft, node_spec=spec, amount=amount, kind=PriceKind.FIXED_EPOCH, product="fixed")
    pricebooks.publish(book=draft)
    job = failed(customer, "", outcome=Outcome.OUT_OF_MEMORY, node_spec="medium", workers_per_node=1)
    assert failures.explain(job).changes == {"node_spec": "slow"}
    job = failed(customer, "", outcome=Outcome.OUT_OF_MEMORY, node_spec="medium", workers_per_node=4)
    assert failures.explain(job).changes == {"node_spec": "dear"}  # four processes need more cores than `slow` has
