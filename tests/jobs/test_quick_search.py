"""The search of the command palette."""

from django.urls import reverse

from jobs import quick_search
from tests.factories.storage import DatasetFactory, ModelVersionFactory


def test_it_finds_each_kind_of_the_organization_by_name_and_jobs_by_number(customer, other, client):
    job = customer.job(name="Net run")
    theirs = other.job(name="net run")
    DatasetFactory(organization=customer.organization, name="networks", description="x" * 200)
    DatasetFactory(organization=other.organization, name="network-of-others")
    ModelVersionFactory(model__organization=customer.organization, model__name="resnet")
    client.force_login(customer.membership.user)
    found = client.get(reverse("api_search"), {"q": " NET "}).json()["results"]
    assert [(hit["kind"], hit["id"]) for hit in found] == [
        ("job", str(job.pk)), ("dataset", "networks"), ("model", "resnet"),
    ]  # fmt: skip
    assert (found[0]["title"], found[0]["detail"]) == (f"#{job.pk} Net run", "Queued")
    assert len(found[1]["detail"]) == 80  # of the description's 200 characters
    assert [hit.id for hit in quick_search.search(customer.organization, f"#{job.pk}")] == [str(job.pk)]
    for query in (str(theirs.pk), f"#{theirs.pk}", "", "\0", "x" * 101, "9" * 40):
        assert quick_search.search(customer.organization, query) == [], query
    for number in range(quick_search.MAX_PER_KIND + 1):
        customer.job(name=f"many {number}")
    assert len(quick_search.search(customer.organization, "many")) == quick_search.MAX_PER_KIND
