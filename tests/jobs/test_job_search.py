"""The search of the list of jobs: filters, order, pages by cursor, counts, saved views."""

from datetime import timedelta

import pytest
from django.utils import timezone

from console.core.errors import InvalidInput, NotFound
from jobs import job_search
from jobs.errors import QuotaExceeded
from jobs.job_search import JobSearch
from jobs.models import Job
from runtime.specs import Outcome
from tests.factories.accounts import MembershipFactory

DAY = timedelta(days=1)


@pytest.fixture
def jobs(customer, other):
    """Five jobs on five days, oldest first; the third has ended. Another organization has one job."""
    found = [
        customer.job(name="alpha"),
        customer.job(name="Beta run", tags=["x"]),
        customer.end(customer.started(name="100%"), Outcome.COMPLETED),
        customer.job(name="beta_2", tags=["x", "y"]),
        customer.job(name="gamma"),
    ]
    other.job(name="beta", tags=["x"])
    now = timezone.now()
    for number, job in enumerate(found):
        Job.objects.filter(pk=job.pk).update(queued_at=now - (len(found) - number) * DAY)
    return found


def found(customer, **parameters):
    return [job.name for job in job_search.page(customer.organization, JobSearch.parse(parameters)).jobs]


@pytest.mark.usefixtures("jobs")
def test_each_filter_and_order_selects_its_jobs(customer, other):
    today = timezone.localdate()
    member = customer.membership.user.email
    everything = ["gamma", "beta_2", "100%", "Beta run", "alpha"]
    for parameters, names in (
        ({}, everything),
        ({"sort": "oldest"}, everything[::-1]),
        ({"state": "open"}, ["gamma", "beta_2", "Beta run", "alpha"]),
        ({"state": "succeeded"}, ["100%"]),
        ({"q": "BETA"}, ["beta_2", "Beta run"]),
        ({"q": "%"}, ["100%"]),  # wildcards of LIKE stand for themselves
        ({"q": "a_"}, ["beta_2"]),
        ({"tag": "x"}, ["beta_2", "Beta run"]),
        ({"tag": "x", "q": "run"}, ["Beta run"]),
        ({"workspace": customer.workspace.name}, everything),
        ({"workspace": "missing"}, []),
        ({"node_spec": "nano"}, everything),
        ({"node_spec": "missing"}, []),
        ({"member": member.upper()}, everything),
        ({"member": other.membership.user.email}, []),
        ({"member": "nobody@example.com"}, []),
        ({"since": str(today - 2 * DAY)}, ["gamma", "beta_2"]),
        ({"until": str(today - 4 * DAY)}, ["Beta run", "alpha"]),
        # Invalid and unknown parameters are ignored.
        ({"since": "no day", "state": "unknown", "q": "\0", "sort": "cost", "page": "3"}, everything),
    ):
        assert found(customer, **parameters) == names, parameters


def test_pages_follow_each_other_in_both_directions(customer, jobs, monkeypatch):
    monkeypatch.setattr(job_search, "PAGE_SIZE", 2)
    for sort, expected in (("", jobs[::-1]), ("oldest", jobs)):
        search, organization = JobSearch(sort=sort), customer.organization
        first = job_search.page(organization, search)
        assert (first.jobs, first.before, first.after) == (expected[:2], None, expected[1].pk)
        second = job_search.page(organization, search, after=first.after)
        assert (second.jobs, second.before, second.after) == (expected[2:4], expected[2].pk, expected[3].pk)
        third = job_search.page(organization, search, after=second.after)
        assert (third.jobs, third.before, third.after) == (expected[4:], expected[4].pk, None)
        assert job_search.page(organization, search, before=third.before) == second
        assert job_search.page(organization, search, before=second.before) == first
        assert job_search.page(organization, search, after=10**12) == first, "there is no such job"


def test_pages_do_not_lose_jobs_of_the_same_moment(customer, jobs, monkeypatch):
    monkeypatch.setattr(job_search, "PAGE_SIZE", 2)
    monkeypatch.setattr(job_search, "EXPORT_BATCH", 2)
    Job.objects.update(queued_at=timezone.now())
    page = job_search.page(customer.organization, JobSearch())
    seen = [*page.jobs]
    while page.after:
        page = job_search.page(customer.organization, JobSearch(), after=page.after)
        seen += page.jobs
    assert seen == jobs[::-1] == list(job_search.export(customer.organization, JobSearch()))


@pytest.mark.usefixtures("jobs")
def test_names_are_compared_in_a_limited_number_of_jobs_and_counts_stop_at_a_limit(
    customer, monkeypatch, django_assert_num_queries
):
    monkeypatch.setattr(job_search, "WINDOW", 2)  # the first job after the window is compared too
    assert found(customer, q="beta") == ["beta_2"]
    assert found(customer, q="beta", sort="oldest") == ["Beta run"]
    assert found(customer, q="beta", until=str(timezone.localdate() - 3 * DAY)) == ["Beta run"]
    organization = customer.organization
    monkeypatch.setattr(job_search, "COUNT_LIMIT", 2)  # of the four open jobs, one more than the limit is counted
    with django_assert_num_queries(1):
        assert job_search.counts_by_state(organization) == {"open": 3, "succeeded": 1, "failed": 0, "cancelled": 0}
    with django_assert_num_queries(3):  # the end of the window, the ids of the page, and its rows
        assert job_search.page(organization, JobSearch(q="beta")).is_partial
    since = str(timezone.localdate() - 2 * DAY)
    assert not job_search.page(organization, JobSearch(q="beta", since=since)).is_partial
    assert not job_search.page(organization, JobSearch()).is_partial


def test_a_view_belongs_to_one_member(customer, monkeypatch):
    mine, search = customer.membership, JobSearch(state="failed", q="be ta")
    colleague = MembershipFactory(organization=customer.organization)
    view = job_search.save_view(membership=mine, name="  My   view ", search=search)
    assert (view.name, JobSearch.parse(view.query)) == ("My view", search)
    assert job_search.save_view(membership=mine, name="My view", search=JobSearch()).pk == view.pk
    assert job_search.views(colleague) == []
    with pytest.raises(NotFound):
        job_search.delete_view(membership=colleague, pk=view.pk)
    for name in ("", "x" * 61, "a\0b", "\ud800"):
        with pytest.raises(InvalidInput):
            job_search.save_view(membership=mine, name=name, search=search)
    monkeypatch.setattr(job_search, "MAX_VIEWS", 1)
    job_search.save_view(membership=mine, name="My view", search=search)  # replaces the view of this name
    with pytest.raises(QuotaExceeded):
        job_search.save_view(membership=mine, name="Another", search=search)
    job_search.delete_view(membership=mine, pk=view.pk)
    assert job_search.views(mine) == []
