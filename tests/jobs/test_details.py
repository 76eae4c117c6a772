"""Name, tags, notes and retention of a job: limits, filters, the deletion of its files, and the notice before it."""

from datetime import timedelta

import pytest
from django.core import mail
from django.db import connection
from django.utils import timezone

from console.accounts.models import AuditEvent
from console.accounts.roles import Role
from jobs import details, expiry, orders, reconciliation, results
from jobs.models import Attempt, DeletionNotice, Job
from runtime.specs import Outcome
from storage.models import Allocation
from tests.factories.accounts import MembershipFactory
from tests.racing import together

pytestmark = pytest.mark.django_db
DAY = timedelta(days=1)


def patch(api, customer, job, **body):
    return api(customer.membership).patch(f"/api/v1/jobs/{job.pk}/", body)


def age(job, by):
    """Move the job's end into the past, and store when its files are deleted then."""
    Job.objects.filter(pk=job.pk).update(finished_at=timezone.now() - by)
    results.measure(job)


def test_details_are_changed_and_jobs_found_by_them(api, customer, notebook):
    job = customer.job(name="  First \n run ", tags=["mnist", "baseline", "mnist"])
    assert (job.name, job.tags) == ("First run", ["mnist", "baseline"])
    answer = patch(api, customer, job, notes="lr too high\r\n", tags=["mnist"])
    assert answer.status_code == 200
    changed = {"name": "First run", "tags": ["mnist"], "notes": "lr too high", "keep_until": None}
    assert answer.json().items() >= changed.items()
    assert AuditEvent.objects.get(action="job.changed").data == {"fields": ["notes", "tags"]}
    assert patch(api, customer, job, name="").json()["name"] == "train.py"  # the script's, as for an order without one
    assert patch(api, customer, notebook.job, name="").json()["name"] == customer.workspace.name
    assert customer.job(tags="a, b c").tags == ["a", "b", "c"]
    found = api(customer.membership).get("/api/v1/jobs/", {"name": "TRAIN", "tag": "mnist"}).json()["results"]
    assert [each["id"] for each in found] == [job.pk]


BEYOND = {
    "name": ("x" * 101, "\ud800", "a\x00", 5),
    "tags": ([f"t{number}" for number in range(21)], ["x" * 41], ["Upper"], [""], [1], {}),
    "notes": ("x" * 5001, "\ud800", []),
    "keep_until": (
        "soon", "2020-01-01T00:00:00Z", "2099-01-01T00:00:00Z", 5,
        "9999-12-31T23:59:59-23:59",  # in UTC a day later, which Python cannot represent
    ),
}  # fmt: skip


def test_values_beyond_the_limits_are_refused_at_their_field(customer):
    job = customer.job()
    for field, value in [(name, value) for name, values in BEYOND.items() for value in values]:
        with pytest.raises(details.InvalidInput) as refused:
            details.update_details(job=job, user=None, data={field: value})
        assert set(refused.value.fields) == {field}, value
    assert not AuditEvent.objects.filter(action="job.changed").exists()


def test_files_are_kept_until_the_chosen_time(api, customer):
    job = customer.ended_with_log()
    default = job.finished_at + results.DEFAULT_RETENTION
    assert results.deletion_time(job) == default
    later = default + 10 * DAY
    answer = patch(api, customer, job, keep_until=later.isoformat())
    assert answer.status_code == 200
    assert Allocation.objects.get().kept_until == later
    age(job, 35 * DAY)  # after the default of 30 days, before the chosen 40
    reconciliation.delete_old_runs()
    assert customer.backend.names()
    customer.quota(max_storage_bytes=0)  # a full quota forbids only to keep files for longer
    answer = patch(api, customer, job, keep_until=(later + DAY).isoformat())
    assert (answer.status_code, answer.json()["code"]) == (409, "quota_exceeded")
    assert "quota is used up" in answer.json()["fields"]["keep_until"]
    assert patch(api, customer, job, keep_until=(timezone.now() + DAY).isoformat()).status_code == 200
    assert patch(api, customer, job, keep_until=None).status_code == 200  # back to the default, which is over
    assert "deleted" in patch(api, customer, job, keep_until=later.isoformat()).json()["fields"]["keep_until"]
    reconciliation.delete_old_runs()
    assert not customer.backend.names()


def test_files_of_an_open_job_stay_whatever_time_was_chosen_and_get_their_retention_after_its_end(customer):
    attempt = customer.started()
    Job.objects.update(keep_until=timezone.now() - DAY)
    Attempt.objects.update(finished_at=timezone.now() - 99 * DAY)  # as if the job waited long for its retry
    reconciliation.delete_old_runs()
    assert attempt.run_name in customer.backend.names()
    Job.objects.update(keep_until=None)
    Attempt.objects.update(finished_at=None)
    job = customer.end(attempt, Outcome.NODE_LOST)
    (customer.backend.run_folder(attempt.run_name) / "log").write_bytes(b"x")
    results.count_storage(job.pk)
    assert Allocation.objects.get().kept_until is None
    orders.cancel_job(membership=customer.membership, job=job)  # while it waits for its retry
    reconciliation.delete_old_runs()
    job.refresh_from_db()
    assert Allocation.objects.get().kept_until == job.finished_at + results.DEFAULT_RETENTION


def test_the_deletion_is_announced_once_to_those_who_can_save_the_files(api, customer):
    MembershipFactory(organization=customer.organization, role=Role.VIEWER)
    jobs = [customer.ended_with_log(name=name) for name in ("soon", "also soon", "fresh")]
    assert expiry.announce() == 0
    for job in jobs[:2]:
        age(job, results.DEFAULT_RETENTION - 6 * DAY)  # the notice is sent seven days before
    assert [expiry.announce(), expiry.announce()] == [1, 0]
    (message,) = mail.outbox
    assert message.to == [customer.membership.user.email]
    for words in (f"#{jobs[0].pk} soon", f"#{jobs[1].pk} also soon", f"/jobs/{jobs[0].pk}/"):
        assert words in message.body
    assert "fresh" not in message.body
    # Another time of deletion needs another notice.
    patch(api, customer, jobs[0], keep_until=(timezone.now() + 20 * DAY).isoformat())
    assert expiry.announce() == 0
    patch(api, customer, jobs[0], keep_until=(timezone.now() + 2 * DAY).isoformat())
    assert expiry.announce() == 1
    assert "also soon" not in mail.outbox[1].body


@pytest.mark.django_db(transaction=True)
def test_two_workers_announce_once(customer):
    age(customer.ended_with_log(), results.DEFAULT_RETENTION - DAY)
    assert sorted(together(expiry.announce, expiry.announce)) == [0, 1]
    assert DeletionNotice.objects.count() == 1


def test_an_index_finds_the_jobs_with_a_tag(db):
    # Without these settings, the planner scans so small a table. Only a bitmap scan can read a GIN index.
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_indexscan = off")
        assert "jobs_by_tag" in Job.objects.filter(tags__contains=["mnist"]).explain()
