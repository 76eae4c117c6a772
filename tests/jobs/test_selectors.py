import time
from datetime import timedelta

import pytest
from django.utils import timezone

from console.accounts.errors import NotFound
from jobs import dispatch, selectors
from jobs.models import Job, MetricPoint, Room
from runtime.specs import Outcome


def points(job, name, values, attempt=1):
    now = timezone.now()
    MetricPoint.objects.bulk_create(
        MetricPoint(job=job, attempt=attempt, name=name, step=step, value=value, at=now)
        for step, value in enumerate(values)
    )


def test_another_organizations_job_is_not_there(customer, other):
    job = customer.job()
    assert selectors.job_for(customer.organization, job.pk) == job
    for pk in (other.job().pk, 10**9, 10**30):
        with pytest.raises(NotFound):
            selectors.job_for(customer.organization, pk)


def test_a_bare_row_is_as_little_there_for_others(customer, other):
    job = customer.job()
    assert selectors.job_row(customer.organization, job.pk) == job
    for pk in (other.job().pk, 10**9):
        with pytest.raises(NotFound):
            selectors.job_row(customer.organization, pk)


def test_a_job_that_starts_is_looked_at_again_by_one_query(customer, django_assert_num_queries):
    job = selectors.job_for(customer.organization, customer.job().pk)
    assert dispatch.start(job)
    job = selectors.job_again(selectors.job_for(customer.organization, job.pk))
    Room.objects.update_or_create(node_spec=job.node_spec, defaults={"answers": False})
    job = selectors.job_again(job)  # the row of the room is new: read whole
    told = selectors.waiting_for(job)
    Room.objects.update(answers=True)
    with django_assert_num_queries(1):
        job = selectors.job_again(job)
    assert selectors.waiting_for(job) != told
    Room.objects.update(answers=False)
    assert selectors.waiting_for(selectors.job_again(job)) == told


def test_the_place_in_the_queue_counts_everybody_who_waits_before(customer, other):
    jobs = [other.job(), customer.job(), other.job(), customer.job()]
    now = timezone.now()
    for number, job in enumerate(jobs):
        Job.objects.filter(pk=job.pk).update(queued_at=now - timedelta(seconds=number // 2))
    ahead = {
        job.pk: job.ahead
        for job in (*selectors.jobs_for(customer.organization), *selectors.jobs_for(other.organization))
    }
    assert [ahead[job.pk] for job in jobs] == [2, 3, 0, 1]
    customer.end(customer.started(nodes=1), Outcome.COMPLETED)
    assert selectors.jobs_for(customer.organization).first().ahead == 0


def test_a_list_asks_as_much_for_many_as_for_one(customer, django_assert_num_queries):
    def summaries():
        rows = selectors.jobs_for(customer.organization).prefetch_related("attempts")
        return [selectors.summary(job) for job in rows]

    for _ in range(2):
        customer.job(nodes=1)
        customer.end(customer.started(nodes=1), Outcome.COMPLETED)
        with django_assert_num_queries(2):
            summaries()
    assert len(summaries()) == 4


def test_a_summary_has_what_the_contract_names(customer):
    found = selectors.summary(selectors.job_for(customer.organization, customer.started().job_id))
    assert set(found) >= {
        "state", "reason", "waiting_for", "progress", "attempts", "started_at", "finished_at",
        "cost_minor", "ceiling_minor",
    }  # fmt: skip
    assert (found["state"], found["waiting_for"], found["finished_at"]) == ("running", "", None)
    assert found["attempts"][0]["number"] == 1


def test_the_time_left_is_estimated_and_never_past_the_deadline(customer):
    attempt = customer.started(at=time.time() - 100, max_seconds=600)

    def eta(**fields):
        Job.objects.filter(pk=attempt.job_id).update(**fields)
        return selectors.progress(selectors.job_for(customer.organization, attempt.job_id))["eta_seconds"]

    assert eta() == pytest.approx(0, abs=2)  # the quote's 100 s at p50 are over
    assert eta(progress=0.5) == pytest.approx(100, abs=2)
    assert eta(progress=0.01) == pytest.approx(500, abs=2)
    customer.end(attempt, Outcome.COMPLETED)
    assert eta() is None


def test_curves_come_sorted_whole_or_since_a_point(customer):
    job = customer.job()
    points(job, "loss", [3.0, 2.0])
    curves, last = selectors.metrics(job)
    assert curves == {"loss": [[0, 3.0], [1, 2.0]]}
    assert selectors.metrics(job, last) == ({}, last)
    points(job, "accuracy", [0.5])
    assert selectors.metrics(job, last)[0] == {"accuracy": [[0, 0.5]]}


def test_long_curves_are_thinned_and_keep_their_ends(customer):
    job = customer.job()
    points(job, "loss", [float(number) for number in range(2500)])
    curve = selectors.metrics(job)[0]["loss"]
    assert len(curve) <= selectors.POINTS_SHOWN + 1
    assert (curve[0], curve[-1]) == ([0, 0.0], [2499, 2499.0])


def test_the_environment_is_the_contracts(customer):
    job = customer.job(workers_per_node=2)
    told = selectors.environment(job, 3)
    assert (told["RANK"], told["LOCAL_RANK"], told["NODE_RANK"], told["WORLD_SIZE"]) == ("3", "1", "1", "4")
    assert (told["EPOCHS"], told["LR"], told["BATCH_SIZE"], told["BACKEND"]) == ("10", "0.01", "32", "gloo")
    assert list(told) == sorted(told)
    for rank in (-1, 4):
        with pytest.raises(NotFound):
            selectors.environment(job, rank)


def test_output_before_during_and_after(customer, backend):
    job = customer.job()
    assert selectors.log(job, 0, 0) == selectors.LogChunk("", 0, eof=False)
    attempt = customer.started()
    backend.write(attempt.run_name, "one\n")
    assert selectors.log(attempt.job, 0, 0) == selectors.LogChunk("one\n", 4, eof=False)
    assert selectors.log(attempt.job, 0, 0, attempt=7).text == ""
    ended = customer.end(attempt, Outcome.COMPLETED)
    assert selectors.log(ended, 0, 2) == selectors.LogChunk("e\n", 4, eof=True)
    backend.lose(attempt.run_name)
    assert selectors.log(ended, 0, 4) == selectors.LogChunk("", 4, eof=True)
    with pytest.raises(NotFound):
        selectors.log(ended, 2, 0)


def test_a_cluster_that_is_away_is_no_fault_of_a_read(customer, backend):
    job = customer.job()
    assert selectors.capacity_now() is not None
    backend.available = False
    assert selectors.capacity_now() is None
    assert selectors.log(job, 0, 0).text == ""


def test_events_and_nodes_and_receipt(customer):
    attempt = customer.started()
    job = attempt.job
    assert [row.event.kind for row in selectors.events(job)] == ["ordered", "starting", "running"]
    assert all(row.sentence.endswith(".") for row in selectors.events(job))
    assert [node["phase"] for node in selectors.nodes(job)] == ["running", "running"]
    assert selectors.receipt(job) is None
    customer.end(attempt, Outcome.COMPLETED)
    assert selectors.receipt(job).total_minor == selectors.cost_minor(selectors.job_for(customer.organization, job.pk))
    assert list(selectors.open_jobs(customer.organization)) == []
    assert [product.name for product in selectors.products()] == ["metered", "fixed"]
