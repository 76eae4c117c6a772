import pytest
from django.utils import timezone

from billing.errors import InsufficientFunds, QuoteExpired
from billing.models import Hold, Quote, Receipt
from console.accounts.errors import InvalidInput, ServiceInactive
from console.accounts.models import AuditEvent
from jobs import activation, bell, orders
from jobs.errors import AlreadyEnded, ChoiceGone, IdempotencyConflict, QuotaExceeded, QuoteBought
from jobs.models import Job, JobDataset, Order, Product
from jobs.states import JobState
from runtime.specs import Outcome
from storage import catalog
from tests.factories.jobs import Customer
from tests.factories.storage import DatasetFactory, DatasetVersionFactory


def place(customer, quote, key=""):
    return orders.place_order(membership=customer.membership, quote=quote, idempotency_key=key)


def nothing_made(customer):
    assert not Order.objects.exists()
    assert not Job.objects.exists()
    assert not Hold.objects.exists()
    assert customer.wallet.held_minor == 0


def test_an_order_holds_the_ceiling_and_queues_the_job(customer, hints, django_capture_on_commit_callbacks):
    dataset = DatasetFactory(organization=customer.organization, name="digits")
    version = DatasetVersionFactory(dataset=dataset)
    quote = customer.quote(datasets=["digits"], arguments=["--fast"])
    with django_capture_on_commit_callbacks(execute=True):
        order = place(customer, quote, "key")
    job = order.job
    assert order.hold.amount_minor == quote.ceiling_minor == customer.wallet.held_minor
    assert (job.state, job.name, job.deadline_seconds) == (JobState.QUEUED, "train.py", quote.deadline_seconds)
    assert (job.lr, job.epochs, job.nodes, job.arguments) == ("0.01", 10, 2, ["--fast"])
    assert [row.version for row in job.job_datasets.all()] == [version]
    assert list(job.events.values_list("kind", "actor")) == [("ordered", customer.membership.user.pk)]
    assert hints == [("dispatch_queue",)]
    assert AuditEvent.objects.filter(action="order.placed", target=f"job:{job.pk}").exists()


def test_the_same_key_or_quote_again_gives_the_same_order(customer):
    quote = customer.quote()
    order = place(customer, quote, "key")
    assert place(customer, quote, "key") == order
    with pytest.raises(QuoteBought):
        place(customer, quote, "another")
    with pytest.raises(IdempotencyConflict):
        place(customer, customer.quote(), "key")
    keyless = customer.quote()
    assert place(customer, keyless) == place(customer, keyless)
    assert Order.objects.count() == Job.objects.count() == Hold.objects.count() == 2


def test_a_known_key_answers_even_when_nothing_new_could_be_bought(customer):
    quote = customer.quote()
    order = place(customer, quote, "key")
    Quote.objects.update(expires_at=timezone.now())
    activation.deactivate(membership=customer.membership)
    quote.refresh_from_db()
    assert place(customer, quote, "key") == order


def test_two_organizations_may_use_one_key(customer, other):
    assert place(customer, customer.quote(), "key") != place(other, other.quote(), "key")


def test_an_expired_quote_buys_nothing(customer):
    quote = customer.quote()
    Quote.objects.update(expires_at=timezone.now())
    quote.refresh_from_db()
    with pytest.raises(QuoteExpired):
        place(customer, quote)
    nothing_made(customer)


def test_a_wallet_too_small_buys_nothing(backend, db):
    poor = Customer(backend, balance_minor=10)
    quote = poor.quote()
    with pytest.raises(InsufficientFunds) as caught:
        place(poor, quote)
    assert caught.value.missing_minor == quote.ceiling_minor - 10
    nothing_made(poor)


def test_without_the_service_there_is_no_quote_and_no_order(customer):
    quote = customer.quote()
    activation.deactivate(membership=customer.membership)
    with pytest.raises(ServiceInactive):
        customer.quote()
    with pytest.raises(ServiceInactive):
        place(customer, quote)
    nothing_made(customer)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("code_path", lambda customer: (customer.folder / "train.py").unlink()),
        ("workspace", lambda customer: customer.workspace.delete()),
        ("product", lambda _customer: Product.objects.update(is_active=False)),
        ("nodes", lambda customer: customer.quota(max_running_nodes=1)),
        ("datasets", lambda customer: catalog.delete_dataset(dataset=customer.organization.datasets.get())),
    ],
)
def test_a_choice_that_went_since_the_quote_buys_nothing(customer, field, change):
    DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"))
    quote = customer.quote(datasets=["digits"])
    change(customer)
    with pytest.raises(ChoiceGone) as caught:
        place(customer, quote)
    assert field in caught.value.fields
    nothing_made(customer)


def test_the_version_that_was_quoted_is_the_one_that_runs(customer):
    dataset = DatasetFactory(organization=customer.organization, name="digits")
    quoted = DatasetVersionFactory(dataset=dataset)
    quote = customer.quote(datasets=["digits"])
    DatasetVersionFactory(dataset=dataset)
    place(customer, quote)
    assert JobDataset.objects.get().version == quoted


def test_a_quota_of_open_jobs_is_kept(customer):
    customer.quota(max_open_jobs=1)
    first = customer.order()
    with pytest.raises(QuotaExceeded):
        customer.order()
    assert Hold.objects.count() == 1
    orders.cancel_job(membership=customer.membership, job=first.job)
    assert customer.order()


def test_a_fault_in_the_middle_leaves_nothing(customer, monkeypatch):
    quote = customer.quote()

    def fail(**_data):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(orders, "record", fail)
    with pytest.raises(RuntimeError):
        place(customer, quote)
    nothing_made(customer)
    monkeypatch.undo()
    assert not Receipt.objects.exists()


def test_cancelling_twice_is_fine_and_an_ended_job_cannot_be(customer, hints, django_capture_on_commit_callbacks):
    attempt = customer.started()
    for _ in range(2):
        with django_capture_on_commit_callbacks(execute=True):
            job = orders.cancel_job(membership=customer.membership, job=attempt.job)
        assert job.state == JobState.STOPPING
    assert hints == [("stop_job", job.pk)]
    customer.end(attempt, Outcome.STOPPED)
    with pytest.raises(AlreadyEnded):
        orders.cancel_job(membership=customer.membership, job=job)


def test_who_hears_of_the_queue_starts_what_waits_and_no_worker_is_asked(
    customer, hints, django_capture_on_commit_callbacks
):
    with bell.QueueListener("default") as queue:
        with django_capture_on_commit_callbacks(execute=True):
            place(customer, customer.quote(), "key")
        assert queue.wait(5)
    assert hints == []


def test_a_cancel_in_the_queue_wakes_the_queue(customer, hints, django_capture_on_commit_callbacks):
    job = customer.job()
    with django_capture_on_commit_callbacks(execute=True):
        orders.cancel_job(membership=customer.membership, job=job)
    assert hints == [("dispatch_queue",)]


class TestRerun:
    def rerun(self, customer, job, key="", **changes):
        return orders.rerun(membership=customer.membership, job=job, changes=changes, idempotency_key=key)

    def test_it_buys_the_same_again_with_changes_and_fresh_data(self, customer):
        dataset = DatasetFactory(organization=customer.organization, name="digits")
        DatasetVersionFactory(dataset=dataset)
        job = customer.job(datasets=["digits"], lr="0.5")
        latest = DatasetVersionFactory(dataset=dataset)
        again = self.rerun(customer, job, epochs=3).job
        assert (again.lr, again.epochs, again.rerun_of, again.code_key) == ("0.5", 3, job, job.code_key)
        assert again.job_datasets.get().version == latest

    def test_a_key_makes_it_once(self, customer):
        job = customer.job()
        assert self.rerun(customer, job, "k") == self.rerun(customer, job, "k")
        assert Job.objects.count() == 2
        with pytest.raises(IdempotencyConflict):
            self.rerun(customer, customer.job(), "k")

    def test_a_bad_change_is_told_at_its_field(self, customer):
        job = customer.job()
        with pytest.raises(InvalidInput) as caught:
            self.rerun(customer, job, lr="abc", nodes=0)
        assert set(caught.value.fields) == {"lr", "nodes"}
        assert Job.objects.count() == 1

    @pytest.mark.parametrize("value", [{}, [], "x", 10**40, -1, None, 3.5])
    def test_what_is_no_job_of_ours_is_no_earlier_run(self, customer, other, value):
        theirs = other.job()
        assert customer.job(rerun_of=value).rerun_of is None
        assert customer.job(rerun_of=theirs.pk).rerun_of is None


class TestAtOnce:
    pytestmark = pytest.mark.django_db(transaction=True)

    @pytest.fixture
    def customer(self, transactional_db, backend, hints):
        return Customer(backend)

    def test_one_request_sent_four_times(self, customer, together):
        quote = customer.quote()
        results = together(*[lambda: place(customer, Quote.objects.get(pk=quote.pk), "key")] * 4)
        assert len({order.pk for order in results}) == 1
        assert Order.objects.count() == Job.objects.count() == Hold.objects.count() == 1
        assert customer.wallet.held_minor == quote.ceiling_minor

    def test_one_quote_under_four_keys(self, customer, together):
        quote = customer.quote()
        calls = [lambda key=key: place(customer, Quote.objects.get(pk=quote.pk), key) for key in "abcd"]
        results = together(*calls)
        assert sum(isinstance(result, Order) for result in results) == 1
        assert sum(isinstance(result, QuoteBought) for result in results) == 3
        assert customer.wallet.held_minor == quote.ceiling_minor

    def test_the_last_place_is_taken_once_and_its_repeat_still_answered(self, customer, together):
        customer.quota(max_open_jobs=1)
        quote, rival = customer.quote(), customer.quote()
        results = together(
            lambda: place(customer, quote, "a"), lambda: place(customer, quote, "a"), lambda: place(customer, rival)
        )
        assert Order.objects.count() == 1
        assert sum(isinstance(result, QuotaExceeded) for result in results) in {1, 2}
        made = Order.objects.get()
        assert all(result == made for result in results if isinstance(result, Order))
        if made.quote_id == quote.pk:
            assert results[:2] == [made, made]

    def test_the_last_money_is_spent_once(self, transactional_db, backend, hints, together):
        poor = Customer(backend, balance_minor=1)
        quotes = [poor.quote() for _ in range(3)]
        poor.wallet.__class__.objects.filter(pk=poor.wallet.pk).update(posted_minor=quotes[0].ceiling_minor + 1)
        results = together(*[lambda quote=quote: place(poor, quote) for quote in quotes])
        assert sum(isinstance(result, Order) for result in results) == 1
        assert sum(isinstance(result, InsufficientFunds) for result in results) == 2
        assert Job.objects.count() == 1

    def test_a_rerun_sent_twice(self, customer, together):
        job = customer.job()
        again = lambda: orders.rerun(membership=customer.membership, job=job, changes={}, idempotency_key="k")
        results = together(again, again, again)
        assert len({order.pk for order in results}) == 1, results
        assert Job.objects.count() == 2
