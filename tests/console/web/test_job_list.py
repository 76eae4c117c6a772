"""The list of jobs: filters and views in the URL, cancelling a selection, the CSV export."""

import csv
import re

from django.urls import reverse

from jobs.models import SavedView
from jobs.states import JobState
from runtime.specs import Outcome
from tests.factories.jobs import Customer


def test_a_search_is_saved_as_a_view_and_opened_again(customer, owner_page):
    job = customer.job(name="find me", tags=["one"])
    customer.job(name="other")
    url = reverse("job_list")
    query = {"tag": "one", "state": "open"}
    listed = owner_page.get(url, query).content.decode()
    assert f"#{job.pk} find me" in listed
    assert "other</a>" not in listed
    assert 'value="one"' in listed
    # Only a list without filters counts the jobs in each state.
    counts = [re.findall(r">Open<span[^>]*>(\d+)<", owner_page.get(url, each).text) for each in ({}, query)]
    assert counts == [["2"], []]
    saved = owner_page.post(reverse("job_view_save"), {"name": "<mine>", "query": "tag=one&state=open&page=9"})
    assert saved["Location"] == f"{url}?state=open&tag=one"
    assert "&lt;mine&gt;" in owner_page.get(url).content.decode()
    (view,) = SavedView.objects.all()
    assert view.query == query
    assert owner_page.post(reverse("job_view_delete", args=[view.pk]), follow=True).status_code == 200
    assert owner_page.post(reverse("job_view_delete", args=[view.pk])).status_code == 404
    assert "The name must have" in owner_page.post(reverse("job_view_save"), {"name": ""}, follow=True).content.decode()


def test_a_selection_is_cancelled_without_ended_and_foreign_jobs(customer, owner_page):
    ended = customer.end(customer.started(), Outcome.COMPLETED)
    jobs = [customer.job(), customer.job(), Customer(customer.backend).job()]
    selected = [str(job.pk) for job in (*jobs, ended)]
    answer = owner_page.post(
        reverse("job_cancel_selected"), {"job": [*selected, "x", "9" * 30], "query": "state=open&x=1"}, follow=True
    )
    assert answer.redirect_chain == [(f"{reverse('job_list')}?state=open", 302)]
    assert "2 jobs are being cancelled." in answer.content.decode()
    for job in jobs:
        job.refresh_from_db()
    assert [job.state for job in jobs] == [JobState.CANCELLED, JobState.CANCELLED, JobState.QUEUED]
    nothing = owner_page.post(reverse("job_cancel_selected"), follow=True)
    assert "0 jobs are being cancelled." in nothing.content.decode()


def test_the_export_has_all_jobs_of_the_search_and_no_formula(customer, owner_page):
    customer.job(name="=1+1", tags=["a", "b"])  # a spreadsheet would execute it, without the quote before it
    customer.job(name="left out")
    answer = owner_page.get(reverse("job_export"), {"tag": "a"})
    text = b"".join(answer.streaming_content).decode("utf-8-sig")
    (row,) = csv.DictReader(text.splitlines())
    assert (row["name"], row["tags"], row["state"], row["nodes"]) == ("'=1+1", "a b", "queued", "2")
    assert row["member"] == customer.membership.user.email
    assert (row["cost"], row["currency"], row["finished_at"]) == ("0.00", "USD", "")
    assert "attachment" in answer["Content-Disposition"]
