"""The status page, as customers and administrators see it."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from billing.models import NodeSpec
from console.accounts.models import Membership
from jobs import clusters, dispatch
from jobs.backend import cluster
from jobs.models import Job
from runtime.specs import Resources
from storage import registries
from storage.models import Image, Registry
from tests.factories.jobs import Customer
from tests.fakes import FakeBackend


@pytest.fixture
def west(settings, monkeypatch, backend, tmp_path):
    """A second cluster, where Medium is sold."""
    settings.TRAINYARD_CLUSTERS = {"east": None, "west": None}
    made = {"east": backend, "west": FakeBackend(root=tmp_path / "west")}
    monkeypatch.setattr("jobs.backend._create", made.__getitem__)
    cluster.cache_clear()
    return made["west"]


def page(client: Client, **headers: str) -> str:
    return client.get(reverse("status"), headers=headers).content.decode()


def test_it_says_which_answer_and_how_many_wait(west, customer: Customer, owner_page: Client) -> None:
    NodeSpec.objects.filter(name="medium").update(cluster="west")
    assert page(owner_page).count("Not asked yet") == 2
    customer.quota(max_running_nodes=100)
    west.total = Resources(2.0, 8192, gpus=4, gpu_type="H200")
    for _ in range(3):
        customer.job(node_spec="medium", nodes=1)
    dispatch.reconcile()
    text = page(owner_page)
    assert text.count(">Answers<") == 2
    card = text[text.index('data-cluster="west"') :]
    assert "Medium" in card
    assert '<dt>Jobs that wait</dt><dd class="num">2</dd>' in card
    assert '<dt>Runs under way</dt><dd class="num">1</dd>' in card
    assert "0 of 2 free" in card


def test_one_that_is_away_is_said_to_everybody_and_why_to_administrators(
    west, customer: Customer, owner_page: Client, member: Membership
) -> None:
    west.available = False
    dispatch.reconcile()
    text = page(owner_page)
    assert "1 cluster does not answer" in text
    assert "nothing is lost" in text
    assert "The fake cluster is away." not in text
    customer.membership.user.is_staff = True
    customer.membership.user.save()
    text = page(owner_page)
    assert "The fake cluster is away." in text
    assert "manage.py check_cluster west" in text
    west.available = True
    dispatch.reconcile()
    assert "does not answer" not in page(owner_page)


def test_isolation_gaps_are_for_administrators(customer: Customer, backend, owner_page: Client, monkeypatch) -> None:
    monkeypatch.setattr(backend, "isolation_gaps", lambda: ["Runs share the <network>."])
    assert "Runs share" not in page(owner_page)
    customer.membership.user.is_staff = True
    customer.membership.user.save()
    assert "Runs share the &lt;network&gt;." in page(owner_page)


def test_htmx_gets_the_cards_alone(customer: Customer, owner_page: Client) -> None:
    text = page(owner_page, **{"HX-Request": "true"})
    assert text.lstrip().startswith('<div id="clusters"')


def test_a_page_does_not_wait_for_a_cluster_that_is_known_to_be_away(
    west, customer: Customer, owner_page: Client, monkeypatch
) -> None:
    clusters.note(name="west", answers=False, detail="No route.")

    def asked(*_arguments: object, **_options: object) -> None:
        raise AssertionError("it was asked")

    for name in ("capacity", "check_image", "isolation_gaps"):
        monkeypatch.setattr(west, name, asked)
    for name in ("status", "overview", "training_new", "image_list"):
        assert owner_page.get(reverse(name)).status_code == 200


def test_a_starting_job_says_what_it_waits_for(customer: Customer, backend, owner_page: Client) -> None:
    job: Job = customer.job()
    dispatch.dispatch_queue()
    backend.wait(f"job-{job.pk}-1", "image_credentials", image="r.example/<b>:1")
    dispatch.reconcile()
    text = owner_page.get(reverse("job_detail", args=[job.pk])).content.decode()
    assert "The registry does not hand out the image r.example/&lt;b&gt;:1." in text
    assert "Nothing is charged yet." in text


def test_credentials_come_with_an_image_and_are_never_shown(customer: Customer, owner_page: Client) -> None:
    form = {
        "name": "mine", "title": "Mine", "reference": "registry.example.com:5000/team/x:1", "frameworks": ["pytorch"],
        "username": "robot", "password": " s3cret ",
    }  # fmt: skip
    assert owner_page.post(reverse("image_new"), form).status_code == 302
    registry = Registry.objects.get(organization=customer.organization)
    assert (registry.host, registry.username) == ("registry.example.com:5000", "robot")
    assert registries.password_of(registry) == " s3cret "
    answer = owner_page.post(reverse("image_new"), form | {"reference": "no"})
    assert "s3cret" not in answer.content.decode()
    assert Image.objects.filter(organization=customer.organization).count() == 1


def test_a_node_spec_is_put_on_a_cluster_of_the_settings(west, customer: Customer, admin_client: Client) -> None:
    spec = NodeSpec.objects.get(name="medium")
    address = reverse("admin:billing_nodespec_change", args=[spec.pk])
    text = admin_client.get(address).content.decode()
    assert "the first (east)" in text
    form = {"title": spec.title, "description": "", "position": 1, "is_active": "on"}
    assert admin_client.post(address, form | {"cluster": "south"}).status_code == 200
    assert admin_client.post(address, form | {"cluster": "west"}).status_code == 302
    spec.refresh_from_db()
    assert spec.cluster == "west"
