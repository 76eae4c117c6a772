"""Orders: what they hold and store, their idempotency keys, prices of long runs, cancels and reruns."""

import pytest
from django.utils import timezone

from billing.models import Hold, Quote, Receipt
from console.accounts.models import AuditEvent
from console.core.errors import ServiceInactive
from jobs import activation, orders
from jobs.errors import AlreadyEnded, ChoiceUnavailable, IdempotencyConflict, QuoteBought
from jobs.models import Job, Order, Product
from jobs.states import JobState
from runtime.specs import Outcome
from storage import retention
from tests.factories.storage import DatasetFactory, DatasetVersionFactory


def assert_nothing_bought(customer):
    assert not Order.objects.exists()
    assert not Job.objects.exists()
    assert not Hold.objects.exists()
    assert customer.wallet.held_minor == 0


def test_an_order_holds_the_ceiling_and_queues_the_job(customer, sent_tasks, django_capture_on_commit_callbacks):
    dataset = DatasetFactory(organization=customer.organization, name="digits")
    version = DatasetVersionFactory(dataset=dataset)
    quote = customer.quote(datasets=["digits"], arguments=["--fast"])
    DatasetVersionFactory(dataset=dataset)  # published after the quote: not what was priced
    with django_capture_on_commit_callbacks(execute=True):
        order = customer.place(quote, "key")
    job = order.job
    assert order.hold.amount_minor == quote.ceiling_minor == customer.wallet.held_minor
    assert (job.state, job.name, job.deadline_seconds) == (JobState.QUEUED, "train.py", quote.deadline_seconds)
    assert (job.lr, job.epochs, job.nodes, job.arguments) == ("0.01", 10, 2, ["--fast"])
    assert [row.version for row in job.job_datasets.all()] == [version]
    assert list(job.events.values_list("kind", "actor")) == [("ordered", customer.membership.user.pk)]
    assert sent_tasks == [("dispatch", "default")]
    assert AuditEvent.objects.filter(action="order.placed", target=f"job:{job.pk}").exists()


def test_a_repeated_key_or_quote_returns_the_same_order(customer, other):
    quote = customer.quote()
    order = customer.place(quote, "key")
    assert customer.place(quote, "key") == order
    with pytest.raises(QuoteBought):
        customer.place(quote, "another")
    with pytest.raises(IdempotencyConflict):
        customer.place(customer.quote(), "key")
    assert other.place(other.quote(), "key").organization == other.organization
    keyless = customer.quote()
    assert customer.place(keyless) == customer.place(keyless)
    assert Order.objects.count() == Job.objects.count() == Hold.objects.count() == 3  # one by the other customer
    Quote.objects.update(expires_at=timezone.now())
    activation.deactivate(membership=customer.membership)
    quote.refresh_from_db()
    assert customer.place(quote, "key") == order, "a repeated order is only read"


def test_a_fixed_price_buys_no_week_of_node_time(customer):
    """An epoch may take a week. The time beyond what its fixed price includes is paid by the hour."""
    week = {"product": "fixed", "node_spec": "medium", "nodes": 1, "epochs": 1, "max_seconds": 604_800}
    quote = customer.quote(**week)
    assert quote.terms["included_seconds"] == 60  # the reference of 20 s, times the spread 1.5 and the headroom 2
    # 300 cents an hour for the week less its included minute, and 2 cents for the epoch.
    assert quote.ceiling_minor == round(604_740 * 300 / 3600) + 2
    for seconds in (300, 1500, 9000):  # however slow the epoch is, its time is charged
        began = timezone.now().timestamp() - seconds
        job = customer.end(customer.started(**week, at=began), Outcome.COMPLETED, at=began + seconds)
        charged = Receipt.objects.get(hold=job.order.hold_id).total_minor
        assert charged == pytest.approx((seconds - 60) * 300 / 3600 + 2, abs=1)
    learnt = customer.quote(**week | {"max_seconds": None})
    assert learnt.basis["source"] == "history"
    assert learnt.terms["included_seconds"] == 60
    assert learnt.ceiling_minor >= (learnt.deadline_seconds - 60) * 300 / 3600


def test_without_the_service_there_is_no_quote_and_no_order(customer):
    quote = customer.quote()
    activation.deactivate(membership=customer.membership)
    with pytest.raises(ServiceInactive):
        customer.quote()
    with pytest.raises(ServiceInactive):
        customer.place(quote)
    assert_nothing_bought(customer)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("code_path", lambda customer: (customer.folder / "train.py").unlink()),
        ("workspace", lambda customer: customer.workspace.delete()),
        ("product", lambda _customer: Product.objects.update(is_active=False)),
        ("nodes", lambda customer: customer.quota(max_running_nodes=1)),
        ("datasets", lambda customer: retention.delete_dataset(dataset=customer.organization.datasets.get())),
    ],
)
def test_a_choice_that_became_invalid_after_the_quote_buys_nothing(customer, field, change):
    DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"))
    quote = customer.quote(datasets=["digits"])
    change(customer)
    with pytest.raises(ChoiceUnavailable) as caught:
        customer.place(quote)
    assert field in caught.value.fields
    assert_nothing_bought(customer)


def test_a_cancel_is_sent_once_and_an_ended_job_cannot_be_cancelled(
    customer, sent_tasks, django_capture_on_commit_callbacks
):
    attempt = customer.started()
    waits = customer.job()
    with django_capture_on_commit_callbacks(execute=True):
        for job in (attempt.job, attempt.job, waits):
            orders.cancel_job(membership=customer.membership, job=job)
    # The running job is stopped, once; the end of the waiting one may let another start.
    assert sent_tasks == [("stop_job", attempt.job_id), ("dispatch", "default")]
    customer.end(attempt, Outcome.STOPPED)
    with pytest.raises(AlreadyEnded):
        orders.cancel_job(membership=customer.membership, job=attempt.job)


def rerun(customer, job, key="", **changes):
    return orders.rerun(membership=customer.membership, job=job, changes=changes, idempotency_key=key)


def test_a_rerun_buys_the_same_with_changes_once(customer):
    """`test_snapshots` has the script and the data of a rerun."""
    job = customer.job(lr="0.5")
    order = rerun(customer, job, "k", epochs=3)
    assert (order.job.lr, order.job.epochs, order.job.rerun_of) == ("0.5", 3, job)
    assert order.job.code_key == job.code_key  # so that estimates count both as runs of the same code
    assert rerun(customer, job, "k", epochs=3) == order
    with pytest.raises(IdempotencyConflict):
        rerun(customer, customer.job(), "k")


def test_a_quote_ignores_an_earlier_run_that_is_no_job_of_the_organization(customer, other):
    job = customer.job()
    Job.objects.filter(pk=job.pk).update(id=1)  # JSON's true equals 1
    assert customer.quote(rerun_of=True).purchase["rerun_of"] is None
    Job.objects.filter(pk=1).update(id=job.pk)
    for value in ({}, [], "x", 10**40, -1, None, 3.5, other.job().pk):
        assert customer.quote(rerun_of=value).purchase["rerun_of"] is None, value
