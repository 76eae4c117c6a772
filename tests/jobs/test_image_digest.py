"""The digest of a customer's own image: looked up for a quote, and pinned in the order of that quote."""

import pytest

from jobs import orders
from jobs.run_specs import run_spec
from storage import registries, registry_client
from storage.models import Image
from storage.registry_client import Credentials, Problem, RegistryError
from tests.factories.jobs import start

pytestmark = pytest.mark.django_db
REFERENCE = "registry.example.com:5000/team/train:1"
FIRST, SECOND = "sha256:" + "1" * 64, "sha256:" + "2" * 64


@pytest.fixture
def registry(customer, settings, monkeypatch):
    """A registry with one image. A test sets `answer`: the image's digest, or an error. `asked` lists the requests."""

    class Registry:
        answer = FIRST
        asked = []

    def digest_of(reference, credentials, **_options):
        Registry.asked = [*Registry.asked, (reference, credentials)]
        if isinstance(Registry.answer, Exception):
            raise Registry.answer
        return Registry.answer

    settings.REGISTRY_CHECKS = True
    monkeypatch.setattr(registry_client, "digest_of", digest_of)
    monkeypatch.setattr(registries, "CACHE_SECONDS", 0)
    Image.objects.create(
        organization=customer.organization, name="own", title="Own", frameworks=["pytorch"], reference=REFERENCE
    )
    registries.save_registry(
        organization=customer.organization, host="registry.example.com:5000", username="me", password="hunter2"
    )
    return Registry


def test_all_attempts_use_the_digest_of_the_quote(customer, registry):
    quote = customer.quote(image="own")
    registry.answer = SECOND  # the tag has moved
    job = customer.place(quote).job
    start(job)
    image = run_spec(job.attempts.get()).image
    assert (image.reference, image.digest) == (REFERENCE, FIRST)
    assert registry.asked == [(REFERENCE, Credentials("me", "hunter2"))], "an order asks no registry"
    assert orders.rerun(membership=customer.membership, job=job, changes={}).job.image_digest == SECOND
    quote = customer.quote(image="own")
    Image.objects.filter(name="own").update(reference=REFERENCE.replace("train", "other"))
    edited = customer.place(quote).job
    assert edited.image_digest == "", "the digest of the quote is of another reference"


def test_a_refusal_of_the_registry_prevents_an_order_and_its_absence_does_not(customer, registry, request):
    assert customer.job().image_digest == ""
    assert registry.asked == [], "a built-in image has no registry"
    for problem in Problem:
        registry.answer = RegistryError(problem)
        if problem in {Problem.NO_IMAGE, Problem.UNAUTHORIZED}:
            assert list(customer.refusals(image="own")) == ["image"]
        else:
            assert customer.job(image="own").image_digest == ""
    request.getfixturevalue("no_redis")  # which limits the checks
    asked = len(registry.asked)
    assert (customer.job(image="own").image_digest, len(registry.asked)) == ("", asked)


@pytest.mark.usefixtures("registry")
def test_few_checks_of_an_organization_run_at_once(customer, monkeypatch):
    def ask_again(_reference, _credentials, **_options):
        """Answer the first check; a second one, made before this answer, is refused."""
        assert "Try again" in customer.refusals(image="own")["image"]
        return FIRST

    monkeypatch.setattr(registries, "MAX_CONCURRENT_CHECKS", 1)
    monkeypatch.setattr(registry_client, "digest_of", ask_again)
    assert customer.job(image="own").image_digest == FIRST
