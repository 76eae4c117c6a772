"""Several processes at once: each change happens once and within its quota, and no deadlock ends a process."""

import pytest

from billing.models import BillingPolicy, Quote
from jobs import dispatch, free_estimates, orders, reconciliation, selectors, telemetry
from jobs.errors import QuotaExceeded, QuoteBought
from jobs.models import Attempt, Job, Order
from jobs.states import ACTIVE
from runtime.specs import Outcome
from tests.factories.jobs import Customer, start
from tests.jobs.queueing import states
from tests.racing import together

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("sent_tasks")]


def count(results, kind):
    return sum(isinstance(result, kind) for result in results)


def test_one_quote_under_four_keys_is_bought_once(customer):
    quote = customer.quote()
    results = together(*[lambda key=key: customer.place(Quote.objects.get(pk=quote.pk), key) for key in "abcd"])
    assert (count(results, Order), count(results, QuoteBought)) == (1, 3)
    assert customer.wallet.held_minor == quote.ceiling_minor


def test_the_last_place_in_a_quota_is_taken_once_and_a_repeated_request_gets_the_same_order(customer):
    customer.quota(max_open_jobs=1)
    quote, rival = customer.quote(), customer.quote()
    results = together(
        lambda: customer.place(quote, "a"), lambda: customer.place(quote, "a"), lambda: customer.place(rival)
    )
    order = Order.objects.get()
    assert count(results, QuotaExceeded) in {1, 2}  # two if the rival was first
    assert all(result == order for result in results if isinstance(result, Order))
    if order.quote_id == quote.pk:
        assert results[:2] == [order, order]


@pytest.mark.parametrize("organizations", [1, 5], ids=["of one organization", "of one person in five organizations"])
def test_the_last_free_estimates_are_used_once(customer, backend, organizations):
    BillingPolicy.objects.create(probes_per_day=2)
    buyers = [customer, *(Customer(backend) for _ in range(organizations - 1))]
    for each in buyers[1:]:
        each.membership.user = customer.membership.user
        each.membership.save()
    buyers *= 5 // organizations  # five calls in either case
    results = together(
        *[
            lambda each=each: free_estimates.order_free_estimate(membership=each.membership, data=each.form())
            for each in buyers
        ]
    )
    assert (count(results, Order), count(results, QuotaExceeded)) == (2, 3)


def test_many_dispatchers_start_each_job_once_within_quota_and_capacity(customer, backend):
    customer.quota(max_running_nodes=6)
    jobs = [customer.job(nodes=nodes) for nodes in (4, 1, 1, 2, 1)]
    for _ in range(2):  # the second time there is nothing left to start
        assert together(*[dispatch.dispatch_queue] * 4) == [None] * 4
    running = Job.objects.filter(state__in=ACTIVE)
    assert sum(job.nodes for job in running) == 6
    assert Attempt.objects.count() == running.count() == len(backend.runs)
    assert states(*jobs[:3]) == ["starting"] * 3


def test_the_last_nodes_of_a_quota_are_taken_once(customer, backend):
    customer.quota(max_running_nodes=2)
    jobs = [customer.job() for _ in range(4)]
    results = together(*[lambda job=job: start(Job.objects.get(pk=job.pk)) for job in jobs])
    assert sorted(results) == [False, False, False, True]
    assert Attempt.objects.count() == len(backend.runs) == 1


def test_the_end_of_a_run_sends_a_dispatch_for_its_cluster(customer, backend, sent_tasks):
    customer.quota(max_running_nodes=2)
    first, second, third = customer.job(), customer.job(), customer.job()
    dispatch.dispatch_queue()
    assert states(first, second, third) == ["starting", "queued", "queued"]
    backend.start(f"job-{first.pk}-1")
    backend.end(f"job-{first.pk}-1", Outcome.COMPLETED)
    sent_tasks.clear()
    reconciliation.reconcile_job(job_pk=first.pk)
    assert sent_tasks == [("dispatch", "default"), ("count_storage", first.pk)]
    dispatch.dispatch_queue("default")
    assert states(first, second, third) == ["succeeded", "starting", "queued"]
    orders.cancel_job(membership=customer.membership, job=second)
    backend.lose(f"job-{second.pk}-1")
    sent_tasks.clear()
    reconciliation.stop(job_pk=second.pk)
    assert sent_tasks == [("dispatch", "default")], "the end of a cancelled run that vanished frees capacity too"
    dispatch.dispatch_queue("default")
    assert states(second, third) == ["cancelled", "starting"]


def test_reconciling_and_ingesting_at_once_store_each_point_once(customer, backend):
    attempt = customer.started()
    folder = backend.run_folder(attempt.run_name) / "run"
    for number in range(6):
        backend.write(attempt.run_name, f"epoch {number} loss 0.{number}\n")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f'{{"epoch": {number}, "other": {number}}}\n')
        ingest = lambda: telemetry.ingest(attempt=attempt)
        results = together(lambda: reconciliation.reconcile_job(job_pk=attempt.job_id), ingest, ingest)
        assert count(results, Exception) == 0, results
    curves, _last = selectors.metrics(attempt.job)
    assert [value for _step, value in curves["other"]] == list(range(6))
    assert len(curves["loss"]) == 6
