"""More time for a running notebook: sold once, never beyond what is held, and kept by the cluster."""

import time
from datetime import timedelta
from itertools import count

import pytest
from django.utils import timezone

from billing.errors import InsufficientFunds
from billing.models import HoldExtension, Quote
from console.core.errors import InvalidInput
from jobs import notebooks, orders, reconciliation, selectors
from jobs.errors import ChoiceUnavailable, IdempotencyConflict, NotExtensible, QuotaExceeded, QuoteBought
from jobs.models import Attempt, Job
from runtime.specs import Outcome
from tests.crashes import crash_at
from tests.racing import together

pytestmark = pytest.mark.django_db
HOUR = 3600


def offer(customer, attempt, seconds=HOUR) -> Quote:
    """Return a quote for this much more time."""
    job = notebooks.notebook_for(customer.organization, attempt.job_id)
    return notebooks.quote_extension(membership=customer.membership, job=job, data={"added_seconds": seconds})


def buy(customer, quote, key="") -> Job:
    """Buy the extension, and return the notebook's job."""
    quote = Quote.objects.get(pk=quote.pk)
    return notebooks.place_notebook(membership=customer.membership, quote=quote, idempotency_key=key).job


def run_deadline(customer, attempt) -> int:
    """Reconcile, which tells the cluster a later deadline if one was sold; return the run's deadline on the cluster."""
    reconciliation.reconcile_job(job_pk=attempt.job_id)
    return customer.backend.runs[attempt.run_name].spec.deadline_seconds


def assert_extended(customer, attempt, *, hours: int):
    """The job, the run and the hold are of this many hours. The order's quote was for two."""
    job = Job.objects.select_related("order__hold", "order__quote").get(pk=attempt.job_id)
    hold = job.order.hold
    assert (job.deadline_seconds, run_deadline(customer, attempt)) == (hours * HOUR, hours * HOUR)
    assert hold.amount_minor == customer.wallet.held_minor == job.order.quote.ceiling_minor * hours // 2
    assert sum(hold.extensions.values_list("amount_minor", flat=True)) + job.order.quote.ceiling_minor == (
        hold.amount_minor
    )


def test_a_notebook_runs_for_the_time_that_was_added_and_costs_no_more_than_its_new_ceiling(
    customer, notebook, sent_tasks, django_capture_on_commit_callbacks
):
    quote, view = offer(customer, notebook), selectors.job_for(customer.organization, notebook.job_id)
    # The quote is for the whole time. What is held already is a part of its ceiling.
    assert quote.deadline_seconds == 3 * HOUR
    assert customer.wallet.held_minor == orders.held_minor(quote)
    with django_capture_on_commit_callbacks(execute=True):
        # Without a key, the quote itself identifies the request.
        assert buy(customer, quote).pk == buy(customer, quote).pk == notebook.job_id
    assert ("extend_job", notebook.job_id) in sent_tasks
    assert_extended(customer, notebook, hours=3)
    assert selectors.summary(selectors.refresh_job(view))["ceiling_minor"] == customer.wallet.held_minor
    buy(customer, offer(customer, notebook))
    assert_extended(customer, notebook, hours=4)
    assert buy(customer, quote).deadline_seconds == 4 * HOUR  # the first request once more
    assert_extended(customer, notebook, hours=4)
    # The cluster ends it at the new limit, not at the old one.
    run = customer.backend.runs[notebook.run_name]
    for hours, state in ((3, "running"), (4, "failed")):
        customer.backend.clock = lambda hours=hours: run.status.started_at + hours * HOUR
        reconciliation.reconcile_job(job_pk=notebook.job_id)
        job = Job.objects.get(pk=notebook.job_id)
        assert job.state == state
    receipt = job.order.hold.receipt
    assert (job.reason, receipt.usage["billable_seconds"]) == ("time_limit", pytest.approx(4 * HOUR))
    assert receipt.total_minor == receipt.ceiling_minor == job.order.quote.ceiling_minor * 2
    assert customer.wallet.held_minor == 0


@pytest.mark.django_db(transaction=True)
def test_an_extension_is_sold_once_under_its_key(customer, notebook):
    quote, rival = offer(customer, notebook), offer(customer, notebook)
    results = together(*[lambda: buy(customer, quote, "key")] * 3, lambda: buy(customer, rival, "other"))
    assert HoldExtension.objects.count() == 1
    assert_extended(customer, notebook, hours=3)
    sold = HoldExtension.objects.get().quote
    # The other quote was for the time limit from before the sale.
    assert sum(isinstance(result, ChoiceUnavailable) for result in results) == (1 if sold == quote else 3)
    with pytest.raises(QuoteBought):
        buy(customer, sold, "a third key")
    with pytest.raises(IdempotencyConflict):
        buy(customer, offer(customer, notebook), HoldExtension.objects.get().idempotency_key)


@pytest.mark.django_db(transaction=True)
def test_a_console_that_is_killed_at_any_step_extends_all_or_nothing(customer, notebook):
    quote = offer(customer, notebook)
    for step in count(1):
        if not crash_at(step, lambda: buy(customer, quote, "key")):
            break
        assert_extended(customer, notebook, hours=2 + HoldExtension.objects.count())
    assert step > 10
    assert_extended(customer, notebook, hours=3)


@pytest.mark.parametrize("state", ["queued", "stopping", "ended", "about to end", "fixed deadline"])
def test_what_cannot_be_extended_is_neither_priced_nor_sold(customer, notebook, monkeypatch, state):
    quote, held = offer(customer, notebook), customer.wallet.held_minor
    job = notebooks.notebook_for(customer.organization, notebook.job_id)
    assert notebooks.is_extensible(job)
    if state == "queued":
        Job.objects.filter(pk=job.pk).update(state="queued")
    elif state == "stopping":
        orders.cancel_job(membership=customer.membership, job=job)
    elif state == "ended":
        customer.end(notebook, Outcome.COMPLETED)
        held = 0
    elif state == "about to end":
        seconds_left = 30
        Attempt.objects.update(started_at=timezone.now() - timedelta(seconds=2 * HOUR - seconds_left))
    else:
        monkeypatch.setattr(type(customer.backend), "extends_runs", False)
    for call in (lambda: offer(customer, notebook), lambda: buy(customer, quote)):
        with pytest.raises(NotExtensible):
            call()
    assert customer.wallet.held_minor == held
    assert not notebooks.is_extensible(notebooks.notebook_for(customer.organization, notebook.job_id))


def test_a_notebook_that_ends_before_the_cluster_knows_its_extension_gets_the_rest_back(customer, notebook):
    customer.backend.clock = lambda: time.time() + 2 * HOUR  # the run has reached the deadline that the cluster knows
    buy(customer, offer(customer, notebook))
    reconciliation.reconcile_job(job_pk=notebook.job_id)
    receipt = Job.objects.get(pk=notebook.job_id).order.hold.receipt
    assert receipt.usage["billable_seconds"] == pytest.approx(2 * HOUR)
    assert receipt.total_minor * 3 == receipt.ceiling_minor * 2  # two of three hours
    assert customer.wallet.held_minor == 0


def test_the_next_attempt_of_an_extended_notebook_has_its_time_and_gets_more(customer, notebook):
    buy(customer, offer(customer, notebook))
    job = customer.end(notebook, Outcome.NODE_LOST)
    assert job.state == "queued"
    second = customer.run(job)
    assert_extended(customer, second, hours=3)
    buy(customer, offer(customer, second))
    assert_extended(customer, second, hours=4)


def test_an_extension_needs_money_and_storage_and_fits_into_a_week(customer, notebook, monkeypatch):
    with pytest.raises(InvalidInput) as refused:
        offer(customer, notebook, 7 * 24 * HOUR - HOUR)  # an hour too much: the notebook has two already
    assert "168" in str(refused.value.fields["added_seconds"])
    quote, wallet = offer(customer, notebook), customer.wallet
    type(wallet).objects.filter(pk=wallet.pk).update(posted_minor=wallet.held_minor)  # no more than the notebook holds
    with pytest.raises(InsufficientFunds):
        buy(customer, quote)
    monkeypatch.setattr(orders, "storage_refusal", lambda _organization: "Full.")
    with pytest.raises(QuotaExceeded):
        buy(customer, quote)
    assert_extended(customer, notebook, hours=2)
