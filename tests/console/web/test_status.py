"""The status page, as customers and administrators see it."""

import pytest
from django.urls import reverse

from billing.models import NodeSpec
from jobs import clusters, reconciliation
from jobs.clusters import cluster
from runtime.specs import Resources
from tests.fakes import FakeBackend


@pytest.fixture
def west(settings, monkeypatch, backend, tmp_path):
    """A second cluster, beside `east`, the customer's backend."""
    settings.TRAINYARD_CLUSTERS = {"east": None, "west": None}
    backends = {"east": backend, "west": FakeBackend(root=tmp_path / "west")}
    monkeypatch.setattr("jobs.clusters._create", backends.__getitem__)
    cluster.cache_clear()
    return backends["west"]


def page(client, **headers):
    return client.get(reverse("status"), headers=headers).content.decode()


def test_each_cluster_shows_its_state_and_its_queue(west, customer, owner_page):
    NodeSpec.objects.filter(name="medium").update(cluster="west")
    assert page(owner_page).count("Not checked yet") == 2
    customer.quota(max_running_nodes=100)  # so that only the cluster limits what runs
    west.total = Resources(2.0, 8192, gpus=4, gpu_type="H200")  # one node of `medium`, which needs no GPU
    for _ in range(3):
        customer.job(node_spec="medium", nodes=1)
    reconciliation.reconcile()
    text = page(owner_page)
    assert text.count(">Online<") == 2
    card = text[text.index('data-cluster="west"') :]
    for part in (
        "Medium", '<dt>Waiting jobs</dt><dd class="num">2</dd>', '<dt>Active runs</dt><dd class="num">1</dd>',
        "0 of 2 free",
    ):  # fmt: skip
        assert part in card
    assert page(owner_page, **{"HX-Request": "true"}).lstrip().startswith('<div id="clusters"')


def test_only_administrators_see_why_a_cluster_does_not_answer_and_isolation_gaps(
    west, customer, owner_page, monkeypatch
):
    west.available = False
    reconciliation.reconcile()
    monkeypatch.setattr(customer.backend, "isolation_gaps", lambda: ["Runs share the <network>."])
    text = page(owner_page)
    assert "1 cluster is not responding" in text
    assert "The fake cluster is away." not in text
    assert "Runs share" not in text
    type(customer.membership.user).objects.filter(pk=customer.membership.user_id).update(is_staff=True)
    text = page(owner_page)
    for shown in ("The fake cluster is away.", "manage.py check_cluster west", "Runs share the &lt;network&gt;."):
        assert shown in text
    west.available = True
    reconciliation.reconcile()
    assert "is not responding" not in page(owner_page)


@pytest.mark.usefixtures("customer")
def test_no_page_waits_for_a_cluster_that_does_not_answer(west, owner_page, monkeypatch):
    clusters.record_status(name="west", answers=False, detail="No route.")

    def fail(*_arguments, **_options):
        raise AssertionError("a page asked the cluster")

    for name in ("capacity", "check_image", "isolation_gaps"):
        monkeypatch.setattr(west, name, fail)
    for name in ("status", "overview", "training_new", "image_list"):
        assert owner_page.get(reverse(name)).status_code == 200


@pytest.mark.usefixtures("west", "customer")
def test_an_administrator_assigns_a_node_spec_to_a_cluster_of_the_settings(admin_client):
    spec = NodeSpec.objects.get(name="medium")
    path = reverse("admin:billing_nodespec_change", args=[spec.pk])
    assert "first cluster (east)" in admin_client.get(path).content.decode()
    form = {"title": spec.title, "description": "", "position": 1, "is_active": "on"}
    # There is no such cluster, so the form is shown again.
    assert admin_client.post(path, form | {"cluster": "south"}).status_code == 200
    assert admin_client.post(path, form | {"cluster": "west"}).status_code == 302
    spec.refresh_from_db()
    assert spec.cluster == "west"
