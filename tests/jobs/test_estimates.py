"""Estimates: what is learned from earlier runs, which of them count, and how accurate estimates were."""

from datetime import timedelta

import pytest
from django.utils import timezone

from jobs import cost_analysis, estimates, free_estimates, selectors
from jobs.estimates import EarlierRun, estimate_from_runs, pace_of
from jobs.models import Attempt, Job
from jobs.purchase import parse
from jobs.states import EndReason, JobState
from runtime.specs import Outcome
from tests.factories.storage import DatasetFactory, DatasetVersionFactory


def runs(*times, nodes=2, epochs=10, **same):
    """Earlier runs that took these seconds."""
    return [EarlierRun(nodes, epochs, seconds, **same) for seconds in times]


LENGTHS = [EarlierRun(2, epochs, 30 + 5 * epochs) for epochs in (1, 2, 5, 10, 20, 40)]  # 30 s to start, 5 s an epoch
NEAREST = runs(100, has_same_data=True, has_same_batch=True)
OTHER_BATCH = runs(200, has_same_data=True, has_same_batch=False)
OTHER_DATA = runs(300, has_same_data=False, has_same_batch=False)
ONE_AND_TWO = [*runs(160, nodes=1), *runs(100, nodes=2)]  # twice the nodes are 1.6 times as fast
# As in `jobs.estimates`, but written out, so that a test fails if one changes there by mistake.
FEW_RUNS_SPREAD, OTHER_BATCH_SPREAD, OTHER_DATA_SPREAD = 1.2, 1.2, 1.5
SCALED_SPREAD, UNMEASURED_SPREAD, FREE_ESTIMATE_SPREAD = 1.2, 1.5, 1.5
# Earlier runs, nodes and epochs of the next run, and its p50 and p90. If it was not measured, twice the nodes are
# assumed to be 2 ** 0.8 times as fast. The 90th percentile of 100, 200 and 300 s is 280 s, and twice the epochs take
# 560 s.
LEARNED = {
    "the median time of an epoch counts": (runs(100, 200, 300), 2, 20, 400, 560),
    "one run leaves a margin": (runs(100), 2, 10, 100, 100 * FEW_RUNS_SPREAD),
    "many equal runs leave none": (runs(100, 100, 100, 100, 100), 2, 10, 100, 100),
    "start-up time is separated from the time of the epochs": (LENGTHS, 2, 100, 530, None),
    "one outlier changes little": ([*LENGTHS, EarlierRun(2, 10, 4000)], 2, 100, pytest.approx(530, rel=0.1), None),
    "runs on as many nodes count alone": ([*runs(100), *runs(9999, nodes=1)], 2, 10, 100, 100 * FEW_RUNS_SPREAD),
    "other node counts are scaled by their efficiency": (
        ONE_AND_TWO, 4, 10, 62.5, 62.5 * SCALED_SPREAD * FEW_RUNS_SPREAD,
    ),
    "fewer nodes are slower by the measured efficiency": ([*runs(100, nodes=4), *runs(50, nodes=8)], 1, 10, 400, None),
    "one node count shows no efficiency": (
        runs(100, nodes=1), 2, 10, 100 / 2**0.8, 100 / 2**0.8 * UNMEASURED_SPREAD * FEW_RUNS_SPREAD,
    ),
    # Efficiency is limited: twice the nodes take at most twice and at least half the time.
    "more nodes may be slower": ([*runs(100, nodes=1), *runs(400, nodes=2)], 4, 10, 800, None),
    "no code gains more than its nodes": ([*runs(100, nodes=1), *runs(10, nodes=2)], 4, 10, 5, None),
    "the same data and batch size come first": ([*NEAREST, *OTHER_BATCH, *OTHER_DATA], 2, 10, 100, None),
    "runs on the same data come second": (
        [*OTHER_BATCH, *OTHER_DATA], 2, 10, 200, 200 * OTHER_BATCH_SPREAD * FEW_RUNS_SPREAD,
    ),
    "without these, all runs count": (OTHER_DATA, 2, 10, 300, 300 * OTHER_DATA_SPREAD * FEW_RUNS_SPREAD),
}  # fmt: skip


def test_earlier_runs_estimate_the_next():
    for name, (samples, nodes, epochs, p50, p90) in LEARNED.items():
        estimate = estimate_from_runs(samples, nodes=nodes, epochs=epochs)
        expected = p50 if not isinstance(p50, int | float) else pytest.approx(p50, abs=0.01)
        assert estimate.p50_seconds == expected, name
        assert p90 is None or estimate.p90_seconds == pytest.approx(p90, rel=0.001), name


def test_an_estimate_names_what_it_is_based_on():
    assert estimate_from_runs([], nodes=1, epochs=10) is None
    same = estimate_from_runs(runs(100, 200, 300), nodes=2, epochs=20)
    assert (same.source, same.runs, same.measured_nodes, same.efficiency) == ("history", 3, (), None)
    scaled = estimate_from_runs(ONE_AND_TWO, nodes=4, epochs=10)
    assert (scaled.runs, scaled.measured_nodes, scaled.efficiency) == (2, (1, 2), pytest.approx(0.8))
    pace = pace_of([EarlierRun(2, 1, 100), EarlierRun(2, 2, 90), EarlierRun(2, 3, 80), EarlierRun(2, 4, 70)])
    assert pace.start_seconds == 0, "less time for more epochs is noise, and says nothing about the start"


def estimate(customer, **changes):
    return estimates.estimate(parse(organization=customer.organization, data=customer.form(**changes)))


def completed(customer, seconds, *, reasons=(EndReason.COMPLETED,), spans=1, **changes):
    """A job whose last attempt took `seconds`. `spans` above 1: the attempt lost nodes."""
    job = customer.job(**changes)
    now = timezone.now()
    times = {"started_at": now - timedelta(seconds=seconds), "finished_at": now}
    Job.objects.filter(pk=job.pk).update(state=JobState.SUCCEEDED, reason=EndReason.COMPLETED, **times)
    for number, reason in enumerate(reasons, 1):
        Attempt.objects.create(
            job=job, number=number, backend="fake", claimed_at=now, granted_nodes=job.nodes, reason=reason,
            spans=[{"nodes": 1, "started_at": 0.0}] * spans, **times,
        )  # fmt: skip
    return job


def test_a_first_run_is_estimated_by_the_reference_or_the_customers_limit(customer):
    # 10 epochs on 2 nodes. The product's reference is 20 s for an epoch on one node, and scales linearly.
    for limit, expected in ((None, ("reference", 100, 150)), (60, ("customer", 60, 60))):
        result = estimate(customer, max_seconds=limit)
        assert (result.source, result.p50_seconds, result.p90_seconds) == expected


def test_earlier_runs_of_the_same_script_on_the_same_spec_count(customer, other):
    for seconds in (100, 200, 300):
        completed(customer, seconds)
    customer.write("other.py")
    for changes in ({"nodes": 1}, {"workers_per_node": 2}, {"node_spec": "small"}, {"code_path": "other.py"}):
        completed(customer, 9999, **changes)
    completed(other, 9999)
    result = estimate(customer, epochs=20)
    assert (result.source, result.runs) == ("history", 3)
    assert result.p50_seconds == pytest.approx(400, rel=0.01)
    assert result.p90_seconds == pytest.approx(560, rel=0.01)
    quote = customer.quote(nodes=4)  # no run was on four nodes, so that the one on one node counts too
    quote.refresh_from_db()
    assert quote.basis.items() >= {"source": "history", "runs": 4, "measured_nodes": [1, 2]}.items()
    assert 0 < quote.basis["efficiency"] <= 1


def test_runs_that_failed_or_were_retried_or_lost_nodes_are_ignored(customer):
    job = completed(customer, 100)
    Job.objects.filter(pk=job.pk).update(state=JobState.FAILED, reason=EndReason.CODE_FAILED)
    completed(customer, 100, reasons=(EndReason.NODE_LOST, EndReason.COMPLETED))
    completed(customer, 100, spans=2)
    assert estimate(customer).source == "reference"


def test_runs_on_the_same_data_and_batch_size_come_first(customer):
    dataset = DatasetFactory(organization=customer.organization, name="digits")
    DatasetVersionFactory(dataset=dataset)
    completed(customer, 500, datasets=["digits"])
    for p90 in (500 * FEW_RUNS_SPREAD, 500 * FEW_RUNS_SPREAD * OTHER_DATA_SPREAD):
        result = estimate(customer, datasets=["digits"])
        assert (result.p50_seconds, result.p90_seconds) == (pytest.approx(500), pytest.approx(p90))
        DatasetVersionFactory(dataset=dataset)  # the next estimate is for a later version than the run read
    completed(customer, 400, batch_size=8)
    completed(customer, 100)
    assert estimate(customer).p50_seconds == pytest.approx(100)
    result = estimate(customer, batch_size=16)  # of 100 and 400 s, the median and the 90th percentile
    assert (result.p50_seconds, result.p90_seconds) == (pytest.approx(250), pytest.approx(370 * OTHER_BATCH_SPREAD))


def estimated(customer, *, seconds=60, epoch=3, **changes):
    """A free estimate on one node, which its time limit ended after `epoch` epochs."""
    job = free_estimates.order_free_estimate(membership=customer.membership, data=customer.form(**changes)).job
    began = customer.backend.clock() - seconds
    attempt = customer.run(job, at=began)
    Job.objects.filter(pk=job.pk).update(epoch=epoch, progress=epoch / job.epochs)
    customer.end(attempt, Outcome.TIME_LIMIT, at=began + seconds)
    job.refresh_from_db()
    return job


def test_a_free_estimate_is_free_and_estimates_the_first_run_by_its_whole_epochs(customer):
    job = estimated(customer, epoch=0)
    assert (job.order.hold.amount_minor, job.order.hold.receipt.total_minor) == (0, 0)
    assert (customer.wallet.posted_minor, customer.wallet.held_minor) == (100_000, 0)
    assert estimate(customer).source == "reference"
    job = estimated(customer, seconds=60, epoch=3)
    one = estimate(customer, nodes=1, epochs=10)
    assert (one.source, one.runs) == ("probe", 1)  # the stored name of free estimates
    assert one.p50_seconds == pytest.approx(200, abs=1)  # 3 epochs took 60 s
    assert estimate(customer, nodes=1, workers_per_node=2).source == "reference", "with other ranks it measured nothing"
    assert one.p90_seconds == pytest.approx(one.p50_seconds * FREE_ESTIMATE_SPREAD * FEW_RUNS_SPREAD)
    DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"))
    for changes, factor in (({"batch_size": 8}, OTHER_BATCH_SPREAD), ({"datasets": ["digits"]}, OTHER_DATA_SPREAD)):
        other = estimate(customer, nodes=1, epochs=10, **changes)
        assert other.p90_seconds == pytest.approx(one.p90_seconds * factor), changes
    two = estimate(customer, nodes=2, epochs=10)
    assert two.p50_seconds == pytest.approx(200 / 2**0.8, abs=1)
    # How it scales was not measured, so the margin of two nodes is wider.
    margin = one.p90_seconds / one.p50_seconds * UNMEASURED_SPREAD
    assert two.p90_seconds == pytest.approx(two.p50_seconds * margin, rel=0.001)
    ended = job.started_at + timedelta(seconds=45)
    Attempt.objects.filter(job=job).update(cursor={"epoch_finished_at": ended.timestamp()})
    assert estimate(customer, nodes=1, epochs=10).p50_seconds == pytest.approx(150, abs=1)  # 3 epochs took 45 s
    completed(customer, 100, nodes=1)
    assert estimate(customer, nodes=1).source == "history", "a paid run counts before a free estimate"


def test_an_outcome_compares_a_job_with_its_quote(customer):
    attempt = customer.started(max_seconds=None)
    attempt.refresh_from_db()
    job = customer.end(attempt, Outcome.COMPLETED, at=attempt.started_at.timestamp() + 130)
    outcome = estimates.outcome(job)  # the quote, by the reference: 100 s at p50, 150 s at p90
    assert (outcome.error, outcome.is_within_p90) == (pytest.approx(0.3), True)
    assert estimates.outcome(customer.job()) is None
    free = customer.run(free_estimates.order_free_estimate(membership=customer.membership, data=customer.form()).job)
    free_job = customer.end(free, Outcome.COMPLETED)
    assert estimates.outcome(free_job) is None, "its time limit is not an estimate"
    [own, *_others] = cost_analysis.alternatives(selectors.job_for(customer.organization, free_job.pk))
    assert (own.nodes, own.basis, own.cost_minor > 0) == (1, cost_analysis.Basis.MEASURED, True)


def test_accuracy_is_reported_by_week_and_source():
    now = timezone.now()
    job, old = Job(finished_at=now), Job(finished_at=now - timedelta(days=14))
    # Job, source, p50 and actual seconds. Free runs are left out.
    outcomes = [
        (job, "history", 100, 110), (job, "history", 100, 70), (job, "reference", 100, 400), (old, "history", 100, 100),
        (old, "free", 100, 10),
    ]  # fmt: skip
    rows = estimates.accuracy(
        [estimates.EstimateOutcome(each, source, p50, p50 * 1.5, actual) for each, source, p50, actual in outcomes]
    )
    newest = [("all", 3), ("history", 2), ("reference", 1)]
    assert [(row.source, row.runs) for row in rows] == [*newest, ("all", 1), ("history", 1)]
    assert (rows[0].median_error, rows[0].within_p90) == (pytest.approx(0.3), pytest.approx(2 / 3))
