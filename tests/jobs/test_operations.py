"""What operators do in `/admin/`: move a run to other machines, drain a cluster, and resume it."""

import time

from django.contrib.auth.models import Permission
from django.urls import reverse
from django.utils import timezone

from console.accounts.models import AuditEvent
from jobs import clusters, dispatch, reconciliation, selectors, usage
from jobs.models import ClusterStatus, Job
from runtime.specs import Outcome, RunPhase
from tests.factories.accounts import UserFactory


def test_a_moved_run_stops_costs_nothing_and_starts_again(admin, customer):
    attempt = customer.started(nodes=1, at=time.time() - 1800)
    page = reverse("admin:jobs_job_move", args=[attempt.job_id])
    assert "The reason must have" in admin.post(page, {"why": " "}).content.decode()
    for _twice in range(2):
        assert admin.post(page, {"why": "Its rack gets new power."}).status_code == 302
    reconciliation.reconcile_job(job_pk=attempt.job_id)
    assert customer.backend.describe(attempt.run_name).phase is not RunPhase.RUNNING

    job = customer.end(attempt, Outcome.STOPPED)
    assert (job.state, job.attempts.get().reason) == ("queued", "platform_error")
    assert usage.billable_seconds(job, job.attempts.all(), timezone.now()) == 0
    sentences = [row.sentence for row in selectors.events(job)]
    assert sum("Its rack gets new power." in sentence for sentence in sentences) == 1
    moved = "An administrator ended the last attempt, so that another one starts. That attempt is free."
    waiting = selectors.waiting_for(selectors.job_for(job.organization, job.pk))
    assert waiting.startswith(moved)
    assert sentences[-1] == moved
    dispatch.dispatch_queue()
    second = job.attempts.last()
    assert second.number == 2
    customer.backend.start(second.run_name)
    customer.end(second, Outcome.STOPPED)  # the earlier move is not the reason of this stop
    assert job.attempts.last().reason == "cancelled"


def test_moves_do_not_use_up_the_retries_of_platform_faults_and_a_run_that_completes_first_succeeds(customer, admin):
    job = customer.job(nodes=1)
    queued = admin.post(reverse("admin:jobs_job_move", args=[job.pk]), {"why": "x"}).content.decode()
    assert "waits in the queue and has no run" in queued
    for number in range(1, 6):  # platform faults would end the job with the third attempt
        dispatch.dispatch_queue()
        attempt = job.attempts.get(number=number)
        customer.backend.start(attempt.run_name)
        reconciliation.reconcile_job(job_pk=job.pk)
        admin.post(reverse("admin:jobs_job_move", args=[job.pk]), {"why": "Repair."})
        customer.end(attempt, Outcome.COMPLETED if number == 5 else Outcome.STOPPED)
    job.refresh_from_db()
    assert (job.state, job.attempts.count()) == ("succeeded", 5)
    assert "already ended" in admin.post(reverse("admin:jobs_job_move", args=[job.pk]), {"why": "x"}).content.decode()


def test_no_run_starts_on_a_drained_cluster_and_the_customer_reads_why(admin, customer, client):
    running = customer.started(nodes=1)
    name = clusters.cluster_names()[0]
    clusters.record_status(name=name, answers=True)
    status = ClusterStatus.objects.get(name=name)
    drain, resume = (reverse(f"admin:jobs_clusterstatus_{each}", args=[status.pk]) for each in ("drain", "resume"))
    assert admin.post(drain, {"why": "New network cards."}).status_code == 302

    job = customer.job(nodes=1)
    dispatch.dispatch_queue()
    job.refresh_from_db()
    assert job.state == "queued"
    assert "New network cards." in selectors.summary(selectors.job_for(customer.organization, job.pk))["waiting_for"]
    client.force_login(customer.membership.user)
    assert "New network cards." in client.get(reverse("status")).content.decode()
    assert Job.objects.get(pk=running.job_id).state == "running"

    staff = UserFactory(is_staff=True)
    client.force_login(staff)
    staff.user_permissions.add(*Permission.objects.filter(codename="view_clusterstatus"))
    assert client.post(resume).status_code == 403
    staff.user_permissions.add(*Permission.objects.filter(codename="change_clusterstatus"))
    assert client.post(resume).status_code == 302
    dispatch.dispatch_queue()
    job.refresh_from_db()
    assert job.state == "starting"
    actions = AuditEvent.objects.filter(target=name).order_by("pk").values_list("action", flat=True)
    assert list(actions) == ["cluster.drained", "cluster.resumed"]
