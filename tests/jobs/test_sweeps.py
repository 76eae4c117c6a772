"""Sweeps: one quote, one hold, trials that are charged within it, and every way in which a sweep ends."""

from __future__ import annotations

import pytest
from django.utils import timezone

from billing import credit, pricebooks
from billing.models import CreditGrant, Hold, Quote, Receipt
from billing.selectors import wallet
from console.core.errors import InvalidInput
from jobs import dispatch, reconciliation, telemetry
from jobs.errors import AlreadyEnded, ChoiceUnavailable, IdempotencyConflict, QuotaExceeded, QuoteBought
from jobs.models import Job, Product, Sweep, Trial
from jobs.sweeps import progress, selectors
from jobs.sweeps.purchase import place_sweep, quote_extension, quote_sweep, stop_sweep
from jobs.sweeps.suggestions import PruningDecision, suggest
from runtime.specs import Outcome
from tests.books import BROKEN_BOOKS, BROKEN_ORDERS, broken
from tests.factories.sweeps import SPACE

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _correct_books():
    """After each test, ledger and orders agree."""
    yield
    assert broken(BROKEN_BOOKS | BROKEN_ORDERS) == {}


def test_a_sweep_holds_once_and_charges_each_trial(sweeper, customer):
    quote = sweeper.quote(arguments=["--seed", "1"], environment={"A": "1"})
    before = customer.wallet
    sweep = place_sweep(membership=customer.membership, quote=quote)
    assert customer.wallet.held_minor == before.held_minor + quote.ceiling_minor
    progress.advance(sweep_pk=sweep.pk)
    assert sweep.trials.count() == 2  # of four, at most two at once: see `Sweeper.form`
    for trial in sweep.trials.select_related("job"):
        job, values = trial.job, trial.parameters
        assert job.lr == str(values["LR"])
        assert job.arguments == ["--seed", "1", f"--hidden={values['--hidden']}"]
        assert job.environment == {"A": "1", "DEPTH": str(values["DEPTH"])}
    assert customer.wallet.held_minor == before.held_minor + quote.ceiling_minor
    sweeper.finish(sweep)
    assert (sweep.state, sweep.reason) == ("ended", "completed")
    assert [trial.outcome for trial in sweep.trials.all()] == ["completed"] * 4
    receipts = list(selectors.receipts(sweep))
    spent = sum(receipt.total_minor for receipt in receipts)
    assert (len(receipts), customer.wallet.held_minor) == (4, before.held_minor)
    assert customer.wallet.posted_minor == before.posted_minor - spent
    shown = selectors.summary(sweep)
    assert shown["best"]["trial"] == 3, "values grow with the number of the trial"
    assert (shown["trials_done"], shown["cost_minor"], shown["ceiling_minor"]) == (4, spent, quote.ceiling_minor)
    assert [row.is_best for row in selectors.trial_rows(sweep)] == [False, False, False, True]


def test_credit_that_a_trial_does_not_use_stays_reserved_for_its_sweep(sweeper, customer):
    gift = CreditGrant(organization=customer.organization, amount_minor=10**6, reason="A gift")
    credit.grant(credit_grant=gift, user=customer.membership.user, account=wallet(customer.organization))
    sweep = sweeper.buy()
    sweeper.run(sweep.trials.first(), 0.5)  # reports an accuracy of 0.5, and completes
    spent = Receipt.objects.get().total_minor
    gift.refresh_from_db()
    assert spent < Receipt.objects.get().hold.amount_minor, "the trial left something"
    assert (gift.used_minor, gift.reserved_minor) == (spent, sweep.hold.quote.ceiling_minor - spent)


INVALID = [
    ({"space": {}}, "space"),
    ({"space": {"RANK": {"type": "int", "low": 1, "high": 2}}}, "space"),  # a variable of the contract
    ({"space": {"EPOCHS": {"type": "float", "low": 1, "high": 2}}}, "space"),
    ({"space": {"EPOCHS": {"type": "int", "low": 1, "high": 10**8}}}, "space"),
    ({"space": {"a\0": {"type": "int", "low": 1, "high": 2}}}, "space"),
    ({"space": {"A": {"type": "categorical", "choices": ["a\nb"]}}}, "space"),
    ({"method": "grid"}, "method"),  # LR has a continuous range
    ({"method": "astrology"}, "method"),
    ({"objective": {"metric": "a", "goal": "enlarge"}}, "objective"),
    ({"objective": {"metric": "a", "goal": "maximize", "against_cost": True}, "method": "cmaes"}, "method"),
    ({"objective": {"metric": "a", "goal": "maximize", "against_cost": True}, "pruner": "median"}, "pruner"),
    ({"trials": 0}, "trials"),
    ({"trials": None}, "trials"),  # neither trials nor a ceiling
    ({"concurrency": 101}, "concurrency"),
    ({"pruner": "sharp"}, "pruner"),
    ({"epochs": 0}, "epochs"),
    ({"ceiling_minor": 1}, "ceiling_minor"),
]


def test_invalid_sweeps_are_refused_at_their_field(sweeper):
    for changes, field in INVALID:
        with pytest.raises(Exception) as refused:  # noqa: PT011 - InvalidInput, or billing's QuoteRefused
            sweeper.quote(**changes)
        assert set(refused.value.fields) == {field}, changes
    assert not Quote.objects.exists()


def test_a_searched_field_may_be_left_out_and_a_grid_ends_by_itself(sweeper):
    form = sweeper.form(
        method="grid",
        trials=100,
        space={"EPOCHS": {"type": "int", "low": 1, "high": 3}, "A": {"type": "categorical", "choices": ["x", "y"]}},
    )
    del form["epochs"]
    quote = quote_sweep(membership=sweeper.customer.membership, data=form)
    sweep = place_sweep(membership=sweeper.customer.membership, quote=quote)
    progress.advance(sweep_pk=sweep.pk)
    sweeper.finish(sweep)
    tried = [(trial.parameters["EPOCHS"], trial.parameters["A"]) for trial in sweep.trials.all()]
    assert tried == [(epochs, letter) for epochs in (1, 2, 3) for letter in "xy"]
    assert sweep.reason == "completed"


def test_a_low_ceiling_starts_fewer_trials(sweeper):
    trial_minor = sweeper.quote(trials=1).ceiling_minor
    quote = sweeper.quote(trials=None, ceiling_minor=trial_minor * 2 + 1)
    assert quote.ceiling_minor == trial_minor * 2 + 1 == sum(line["amount_minor"] for line in quote.lines)
    sweep = place_sweep(membership=sweeper.customer.membership, quote=quote)
    progress.advance(sweep_pk=sweep.pk)
    for _round in range(3):  # runs that use their whole time: each costs the most that a trial can
        for trial in sweep.trials.filter(outcome=""):
            dispatch.dispatch_queue()
            attempt = trial.job.attempts.get()
            sweeper.customer.backend.start(attempt.run_name)
            sweeper.customer.backend.end(attempt.run_name, Outcome.TIME_LIMIT, at=10**11)  # long after its deadline
            reconciliation.reconcile_job(job_pk=trial.job_id)
        progress.advance(sweep_pk=sweep.pk)
    sweep.refresh_from_db()
    assert (sweep.reason, sweep.trials.count()) == ("ceiling", 2)
    assert selectors.cost_minor(sweep) <= quote.ceiling_minor


def test_a_search_against_cost_marks_trials_that_no_other_beats_in_value_and_cost(sweeper, customer):
    """Three trials: the second is better and dearer, the third worse and dearer than the second."""
    plan = {"metric": "accuracy", "goal": "maximize", "against_cost": True}
    sweep = sweeper.buy(objective=plan, method="tpe", trials=3, concurrency=1)
    now = customer.backend.clock()
    for value, seconds in ((0.5, 600), (0.9, 1800), (0.7, 2400)):
        trial = sweep.trials.get(outcome="")
        name = customer.run(trial.job, at=now).run_name
        customer.backend.write(name, f"epoch 1 accuracy {value}\n")
        customer.backend.end(name, Outcome.COMPLETED, at=now + seconds)
        reconciliation.follow(run_name=name)
        progress.advance(sweep_pk=sweep.pk)
    rows = selectors.trial_rows(sweep)
    assert [(row.is_best, row.is_efficient) for row in rows] == [(False, True), (True, True), (False, False)]


def test_stopping_cancels_open_trials_and_returns_the_rest(sweeper, customer, monkeypatch):
    sweep = sweeper.buy(pruner="median")
    monkeypatch.delattr(progress, "judge")  # no error of a pruner can prevent the stop
    first, second = sweep.trials.all()
    sweeper.run(first, 0.5, ends=False)
    stop_sweep(membership=customer.membership, sweep=sweep)
    progress.advance(sweep_pk=sweep.pk)
    second.refresh_from_db()
    assert (second.job.state, second.outcome) == ("cancelled", "")  # the next call records its outcome
    customer.backend.end(first.job.attempts.get().run_name, Outcome.STOPPED)
    reconciliation.reconcile_job(job_pk=first.job_id)
    progress.advance(sweep_pk=sweep.pk)
    sweep.refresh_from_db()
    assert (sweep.state, sweep.reason, sweep.trials.count()) == ("ended", "stopped", 2)
    assert customer.wallet.held_minor == 0
    with pytest.raises(AlreadyEnded):
        stop_sweep(membership=customer.membership, sweep=sweep)


def test_a_trial_counts_when_all_of_its_output_is_read_or_after_a_limit(sweeper, customer, monkeypatch):
    monkeypatch.setattr(telemetry, "FINAL_READ_SECONDS", -1)  # the end of a run reads once, and leaves the rest
    sweep = sweeper.buy(trials=3, concurrency=3)
    read, stuck, failed = sweep.trials.order_by("number")
    for trial in (read, stuck):
        sweeper.run(trial, 0.5)
    sweeper.run(failed, 0.5, outcome=Outcome.CODE_FAILED)  # it has no value to wait for
    attempt = read.job.attempts.get()
    customer.backend.write(attempt.run_name, "epoch 2 accuracy 0.75\n")
    progress.advance(sweep_pk=sweep.pk)
    assert list(sweep.trials.order_by("number").values_list("outcome", flat=True)) == ["", "", "failed"]
    while telemetry.has_rest(attempt := read.job.attempts.get()):
        telemetry.read_rest(attempt.pk)
    Job.objects.filter(pk=stuck.job_id).update(finished_at=timezone.now() - progress.MAX_OUTPUT_DELAY)
    progress.advance(sweep_pk=sweep.pk)
    assert list(sweep.trials.order_by("number").values_list("value", flat=True)) == [0.75, 0.5, None]


def test_a_script_that_always_fails_ends_the_sweep(sweeper):
    sweep = sweeper.buy(trials=50, concurrency=1)
    for _trial in range(progress.FAILING_TRIALS):
        sweeper.run(sweep.trials.get(outcome=""), outcome=Outcome.CODE_FAILED)
        progress.advance(sweep_pk=sweep.pk)
    sweep.refresh_from_db()
    assert (sweep.reason, sweep.trials.count()) == ("failing", progress.FAILING_TRIALS)


def test_a_full_queue_makes_the_sweep_wait_and_a_missing_script_ends_it(sweeper, customer):
    customer.quota(max_open_jobs=1)
    sweep = sweeper.buy()
    sweep.refresh_from_db()
    assert sweep.trials.count() == 1
    assert "limit of 1" in sweep.waiting
    sweep.placed_by.language = "zh-hans"
    sweep.placed_by.save()
    progress.advance(sweep_pk=sweep.pk)
    sweep.refresh_from_db()
    assert "上限" in sweep.waiting  # in the buyer's language, not in the worker's
    customer.quota(max_open_jobs=10)
    progress.advance(sweep_pk=sweep.pk)
    assert sweep.trials.count() == 2
    customer.quota(max_open_jobs=1)
    with pytest.raises(QuotaExceeded, match="limit of 1 queued"):  # the limit, not the two open jobs
        customer.job()
    customer.quota(max_open_jobs=10)
    # Trials run the script of the sweep's order, but the order of a trial needs a script in the workspace too.
    (customer.folder / "train.py").unlink()
    sweeper.finish(sweep)
    assert sweep.reason == "unavailable"
    # After the end, `waiting` says why no further trial could be ordered.
    assert selectors.summary(sweep)["waiting_for"] == sweep.waiting != ""


@pytest.mark.parametrize("pruner", ["median", "asha"])
def test_pruning_stops_a_poor_trial_which_costs_what_it_used(sweeper, customer, pruner):
    sweep = sweeper.buy(trials=7, concurrency=1, pruner=pruner)
    for _trial in range(6):  # more than either pruner needs for a comparison
        sweeper.run(sweep.trials.get(outcome=""), 0.5, 0.7, 0.9)
        progress.advance(sweep_pk=sweep.pk)
    poor = sweep.trials.get(outcome="")
    sweeper.run(poor, 0.1, 0.1, 0.1, ends=False)
    progress.advance(sweep_pk=sweep.pk)
    poor.refresh_from_db()
    assert (poor.is_pruned, poor.job.state) == (True, "stopping")
    customer.backend.end(poor.job.attempts.get().run_name, Outcome.STOPPED)
    reconciliation.reconcile_job(job_pk=poor.job_id)
    progress.advance(sweep_pk=sweep.pk)
    poor.refresh_from_db()
    sweep.refresh_from_db()
    assert (poor.outcome, sweep.state) == ("pruned", "ended")


def test_a_trial_stays_pruned_although_another_process_judged_it_by_older_values(sweeper, monkeypatch):
    sweep = sweeper.buy(concurrency=1, pruner="median")
    trial = sweep.trials.get()
    sweeper.run(trial, 0.1, ends=False)

    def judge_late(**arguments):
        Trial.objects.filter(pk=trial.pk).update(is_pruned=True)  # another process has more values meanwhile
        return PruningDecision(is_pruned=False, state={})

    monkeypatch.setattr(progress, "judge", judge_late)
    progress.advance(sweep_pk=sweep.pk)
    trial.refresh_from_db()
    assert (trial.is_pruned, trial.job.state) == (True, "stopping")


def test_a_quote_buys_one_sweep_and_none_buys_both_a_run_and_a_sweep(sweeper, customer):
    quote = sweeper.quote()
    buy = lambda quote, key: place_sweep(membership=customer.membership, quote=quote, idempotency_key=key)
    first = buy(quote, "k")
    assert buy(quote, "k") == first
    with pytest.raises(QuoteBought):
        buy(quote, "l")
    with pytest.raises(IdempotencyConflict):
        buy(sweeper.quote(), "k")
    with pytest.raises(InvalidInput):
        customer.place(sweeper.quote())
    with pytest.raises(InvalidInput):
        buy(customer.quote(), "m")
    assert Hold.objects.filter(state=Hold.States.HELD).count() == 1
    progress.advance(sweep_pk=first.pk)
    child = Quote.objects.get(order__job__trial__number=0)  # the quote of a trial, which the sweep bought
    with pytest.raises(QuoteBought):
        customer.place(child, "mine")
    assert first.trials.count() == 2


def test_trials_keep_the_prices_and_the_script_of_the_sweeps_order(sweeper, customer):
    sweep = sweeper.buy(concurrency=1)
    customer.write(sweep.trials.get().job.code_path, "import torch\nprint('another script')\n")
    draft = pricebooks.copy(book=pricebooks.current_book(currency="USD"))
    draft.prices.filter(kind="node_hour").update(amount=250)
    pricebooks.publish(book=draft)
    sweeper.run(sweep.trials.get(), 0.5)
    progress.advance(sweep_pk=sweep.pk)
    terms = [quote.terms["hourly"] for quote in Quote.objects.filter(order__job__trial__sweep=sweep)]
    assert len(terms) == 2
    assert len(set(terms)) == 1
    assert len({trial.job.script for trial in sweep.trials.all()}) == 1


def test_an_extension_runs_the_script_and_the_requirements_of_the_first_trial(sweeper, customer):
    customer.write("requirements.txt", "einops\n")
    sweep = sweeper.buy(trials=1, requirements="requirements.txt")
    first = sweep.trials.get().job
    Job.objects.filter(pk=first.pk).update(awaits_packages=False)
    customer.write("requirements.txt", "ujson\n")
    customer.write(first.code_path, "import torch\nprint('another script')\n")
    sweeper.finish(sweep)
    quote = quote_extension(membership=customer.membership, sweep=sweep, data={"trials": 1})
    extension = place_sweep(membership=customer.membership, quote=quote)
    progress.advance(sweep_pk=extension.pk)
    job = extension.trials.get().job
    assert (job.script, job.packages, job.requirements_path) == (first.script, first.packages, "requirements.txt")


def test_a_quote_whose_product_was_deleted_is_refused(sweeper, customer):
    quote = sweeper.quote()
    Product.objects.filter(name=quote.purchase["product"]).delete()
    with pytest.raises(ChoiceUnavailable):
        place_sweep(membership=customer.membership, quote=quote)
    assert customer.wallet.held_minor == 0


def test_each_number_of_a_trial_is_ordered_once(sweeper):
    """Two processes may advance a sweep at once."""
    sweep = sweeper.buy(concurrency=1)
    plan = selectors.plan_of(sweep)
    suggestion = progress._suggest(sweep, plan, [])
    assert progress._order_trial(sweep, suggestion, number=0) is False  # the first trial, which `buy` has ordered
    assert (Trial.objects.count(), Job.objects.count(), Sweep.objects.count()) == (1, 1, 1)
    assert Receipt.objects.count() == 0


def test_an_extension_learns_from_all_earlier_trials(sweeper, customer):
    sweeps = [sweeper.buy(trials=2, concurrency=1, method="tpe", space=SPACE | {"X": SPACE["LR"]})]
    sweeper.finish(sweeps[0])
    for index in (0, 0, -1):  # -1 extends the latest extension; its `extends` is the first sweep nevertheless
        held = customer.wallet.held_minor
        quote = quote_extension(membership=customer.membership, sweep=sweeps[index], data={"trials": 2})
        sweep = place_sweep(membership=customer.membership, quote=quote)
        assert customer.wallet.held_minor == held + quote.ceiling_minor
        assert place_sweep(membership=customer.membership, quote=quote) == sweep
        sweeps.append(sweep)
        progress.advance(sweep_pk=sweep.pk)
        sweeper.finish(sweep)
        assert (sweep.extends, sweep.reason, customer.wallet.held_minor) == (sweeps[0], "completed", held)
    past = [trial for sweep in sweeps for trial in sweep.trials.select_related("job__order__hold")]
    plan = selectors.plan_of(sweeps[-1])
    last = past.pop()
    expected = suggest(
        space=plan.space, goal=plan.goal, method=plan.method, seed=sweeps[-1].quote_id.int % 2**32,
        trials=progress._past_trials(past),
    )  # fmt: skip
    assert (len(past), last.parameters) == (7, expected.parameters)


def test_the_extension_of_a_grid_tries_the_rest_once(sweeper, customer, monkeypatch):
    space = {"LR": {"type": "categorical", "choices": [0.1, 0.2, 0.3, 0.4]}}
    sweep = sweeper.buy(method="grid", trials=2, space=space)
    extend = lambda **data: quote_extension(membership=customer.membership, sweep=sweep, data=data)
    with pytest.raises(InvalidInput):
        extend(trials=5)  # the sweep is still open
    sweeper.finish(sweep)
    with pytest.raises(InvalidInput):
        extend()  # neither trials nor a ceiling
    with monkeypatch.context() as patch:
        patch.setattr("jobs.sweeps.purchase.MAX_TRIALS", 3)  # of which two were tried
        assert extend(trials=900).purchase["sweep"]["trials"] == 1
    first, second = extend(trials=5), extend(ceiling_minor=10**6)
    rest = place_sweep(membership=customer.membership, quote=first)
    with pytest.raises(ChoiceUnavailable):
        place_sweep(membership=customer.membership, quote=second)  # another extension is open
    progress.advance(sweep_pk=rest.pk)
    sweeper.finish(rest)
    with pytest.raises(ChoiceUnavailable):
        place_sweep(membership=customer.membership, quote=second)  # its quote counted fewer earlier trials
    assert [trial.parameters for trial in rest.trials.order_by("number")] == [{"LR": 0.3}, {"LR": 0.4}]
    with pytest.raises(InvalidInput) as refused:
        extend(trials=1)
    assert "tried all" in refused.value.fields["trials"]
