"""What is learnt from earlier runs: pure reckoning, what counts as a run to learn from, and how good it was."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs import calibration, dispatch, probes
from jobs.calibration import Sample, learn, pace_of
from jobs.models import Attempt, Job, MetricPoint
from jobs.purchase import parse
from jobs.states import EndReason, JobState
from runtime.specs import Outcome
from tests.factories.jobs import Customer
from tests.factories.storage import DatasetFactory, DatasetVersionFactory


def runs(*times: float, nodes: int = 2, epochs: int = 10, **same: bool) -> list[Sample]:
    return [Sample(nodes, epochs, seconds, **same) for seconds in times]


class TestReckoning:
    def test_nothing_to_learn_from(self):
        assert learn([], nodes=1, epochs=10) is None

    def test_the_median_by_epoch(self):
        found = learn(runs(100, 200, 300), nodes=2, epochs=20)
        assert (found.source, found.runs, found.p50_seconds) == ("history", 3, 400)
        assert found.p90_seconds == pytest.approx(560)
        assert (found.measured_nodes, found.efficiency) == ((), None)

    def test_one_run_leaves_room(self):
        found = learn(runs(100), nodes=2, epochs=10)
        assert (found.p50_seconds, found.p90_seconds, found.runs) == (100, 120, 1)

    def test_many_alike_leave_none(self):
        found = learn(runs(100, 100, 100, 100, 100), nodes=2, epochs=10)
        assert (found.p50_seconds, found.p90_seconds) == (100, 100)

    def test_runs_of_several_lengths_tell_the_start_from_the_epochs(self):
        told = [Sample(2, epochs, 30 + 5 * epochs) for epochs in (1, 2, 10, 20)]
        pace = pace_of(told)
        assert (pace.start, pace.epoch) == (pytest.approx(30), pytest.approx(5))
        assert learn(told, nodes=2, epochs=100).p50_seconds == pytest.approx(530)

    def test_one_odd_run_bends_nothing(self):
        told = [Sample(2, epochs, 30 + 5 * epochs) for epochs in (1, 2, 5, 10, 20, 40)]
        odd = [*told, Sample(2, 10, 4000)]
        assert learn(odd, nodes=2, epochs=100).p50_seconds == pytest.approx(530, rel=0.1)

    def test_noise_that_looks_like_shrinking_is_not_believed(self):
        pace = pace_of([Sample(2, 1, 100), Sample(2, 2, 90), Sample(2, 3, 80), Sample(2, 4, 70)])
        assert pace.start == 0
        assert pace.epoch > 0

    def test_runs_on_as_many_nodes_count_alone(self):
        told = [*runs(100, nodes=2), *runs(9999, nodes=1)]
        found = learn(told, nodes=2, epochs=10)
        assert (found.p50_seconds, found.runs, found.measured_nodes) == (100, 1, ())

    def test_other_node_counts_are_scaled_by_the_efficiency_they_show(self):
        # from 1 to 2 nodes 1.6 times as fast: from 2 to 4 again
        told = [*runs(160, nodes=1), *runs(100, nodes=2)]
        found = learn(told, nodes=4, epochs=10)
        assert found.p50_seconds == pytest.approx(62.5)
        assert (found.measured_nodes, found.runs) == ((1, 2), 2)
        assert found.efficiency == pytest.approx(0.8)
        assert found.p90_seconds == pytest.approx(62.5 * 1.2 * 1.2)

    def test_scaling_down(self):
        told = [*runs(100, nodes=4), *runs(50, nodes=8)]
        assert learn(told, nodes=1, epochs=10).p50_seconds == pytest.approx(400)

    def test_one_node_count_shows_no_efficiency(self):
        found = learn(runs(100, nodes=1), nodes=2, epochs=10)
        assert found.p50_seconds == pytest.approx(100 / 2**0.8, abs=0.001)
        assert (found.measured_nodes, found.efficiency) == ((1,), None)
        assert found.p90_seconds / found.p50_seconds == pytest.approx(1.5 * 1.2, rel=0.001)

    def test_more_nodes_that_slow_a_run_down_are_believed_so_far(self):
        told = [*runs(100, nodes=1), *runs(400, nodes=2)]
        assert learn(told, nodes=4, epochs=10).p50_seconds == pytest.approx(800)

    def test_no_code_gains_more_than_its_nodes(self):
        told = [*runs(100, nodes=1), *runs(10, nodes=2)]
        assert learn(told, nodes=4, epochs=10).p50_seconds == pytest.approx(5)

    def test_the_nearest_runs_are_taken(self):
        told = [
            *runs(100, same_data=True, same_batch=True),
            *runs(200, same_data=True, same_batch=False),
            *runs(300, same_data=False, same_batch=False),
        ]
        assert learn(told, nodes=2, epochs=10).p50_seconds == 100
        other_batch = learn(told[1:], nodes=2, epochs=10)
        assert (other_batch.p50_seconds, other_batch.p90_seconds) == (200, pytest.approx(200 * 1.2 * 1.2))
        other_data = learn(told[2:], nodes=2, epochs=10)
        assert (other_data.p50_seconds, other_data.p90_seconds) == (300, pytest.approx(300 * 1.5 * 1.2))


class TestRunsToLearnFrom:
    def estimate(self, customer: Customer, **changes: Any):
        return calibration.estimate(parse(organization=customer.organization, data=customer.form(**changes)))

    def ran(self, customer: Customer, seconds: float, *, attempts: int = 1, spans: int = 1, **changes: Any) -> Job:
        job = customer.job(**changes)
        now = timezone.now()
        times = {"started_at": now - timedelta(seconds=seconds), "finished_at": now}
        Job.objects.filter(pk=job.pk).update(state=JobState.SUCCEEDED, reason=EndReason.COMPLETED, **times)
        for number in range(1, attempts + 1):
            Attempt.objects.create(
                job=job,
                number=number,
                backend="fake",
                claimed_at=now,
                granted_nodes=job.nodes,
                reason=EndReason.COMPLETED if number == attempts else EndReason.NODE_LOST,
                spans=[{"nodes": 1, "started_at": 0.0}] * spans,
                **times,
            )
        return job

    def test_a_first_run_is_estimated_by_the_reference(self, customer):
        found = self.estimate(customer, max_seconds=None)
        assert (found.source, found.p50_seconds, found.p90_seconds) == ("reference", 100.0, 150.0)

    def test_the_customers_limit_counts_where_it_is_shorter(self, customer):
        found = self.estimate(customer, max_seconds=60)
        assert (found.source, found.p50_seconds, found.p90_seconds) == ("customer", 60, 60)

    def test_earlier_runs_of_the_same_script_on_the_same_nodes_teach(self, customer, other):
        for seconds in (100, 200, 300):
            self.ran(customer, seconds)
        self.ran(customer, 9999, nodes=1)
        self.ran(customer, 9999, workers_per_node=2)
        self.ran(customer, 9999, node_spec="small")
        customer.write("other.py")
        self.ran(customer, 9999, code_path="other.py")
        self.ran(other, 9999)
        found = self.estimate(customer, epochs=20)
        assert (found.source, found.runs) == ("history", 3)
        assert found.p50_seconds == pytest.approx(400, rel=0.01)
        assert found.p90_seconds == pytest.approx(560, rel=0.01)

    def test_the_quote_says_so(self, customer):
        self.ran(customer, 100, nodes=1)
        self.ran(customer, 60, nodes=2)
        quote = customer.quote(nodes=4)
        quote.refresh_from_db()
        basis = quote.basis
        assert (basis["source"], basis["runs"], basis["measured_nodes"]) == ("history", 2, [1, 2])
        assert 0 < basis["efficiency"] < 1

    def test_a_failed_run_teaches_nothing(self, customer):
        job = self.ran(customer, 100)
        Job.objects.filter(pk=job.pk).update(state=JobState.FAILED, reason=EndReason.CODE_FAILED)
        assert self.estimate(customer).source == "reference"

    def test_a_run_that_was_tried_again_or_lost_nodes_teaches_nothing(self, customer):
        self.ran(customer, 100, attempts=2)
        self.ran(customer, 100, spans=2)
        assert self.estimate(customer).source == "reference"

    def test_runs_on_the_same_data_are_nearer(self, customer):
        dataset = DatasetFactory(organization=customer.organization, name="digits")
        DatasetVersionFactory(dataset=dataset)
        self.ran(customer, 500, datasets=["digits"])
        found = self.estimate(customer, datasets=["digits"])
        assert (found.p50_seconds, found.p90_seconds) == (pytest.approx(500), pytest.approx(600))
        DatasetVersionFactory(dataset=dataset)
        found = self.estimate(customer, datasets=["digits"])
        assert (found.p50_seconds, found.p90_seconds) == (pytest.approx(500), pytest.approx(900))

    def test_another_batch_size_is_less_near(self, customer):
        self.ran(customer, 500, batch_size=8)
        self.ran(customer, 100)
        assert self.estimate(customer).p50_seconds == pytest.approx(100)
        assert self.estimate(customer, batch_size=16).p90_seconds > 1.4 * 100


class TestProbes:
    def probed(self, customer: Customer, backend: Any, *, seconds: float = 60, epoch: int = 3, **changes: Any) -> Job:
        order = probes.place_probe(membership=customer.membership, data=customer.form(**changes))
        job = order.job
        dispatch.start(job)
        attempt = job.attempts.get()
        began = backend.clock() - seconds
        backend.start(attempt.run_name, at=began)
        dispatch.reconcile_job(job_pk=job.pk)
        Job.objects.filter(pk=job.pk).update(epoch=epoch, progress=epoch / job.epochs)
        backend.end(attempt.run_name, Outcome.TIME_LIMIT, at=began + seconds)
        dispatch.reconcile_job(job_pk=job.pk)
        job.refresh_from_db()
        return job

    def estimate(self, customer: Customer, **changes: Any):
        return calibration.estimate(parse(organization=customer.organization, data=customer.form(**changes)))

    def test_it_is_free_on_one_node_and_ends_after_a_minute(self, customer, backend):
        customer_balance = customer.wallet.posted_minor
        job = self.probed(customer, backend, nodes=4, retries=3)
        assert (job.nodes, job.deadline_seconds, job.retries) == (1, 60, 0)
        assert (job.order.hold.amount_minor, job.order.hold.receipt.total_minor) == (0, 0)
        assert (customer.wallet.posted_minor, customer.wallet.held_minor) == (customer_balance, 0)

    def test_what_it_saw_is_the_estimate_of_the_first_run(self, customer, backend):
        assert self.estimate(customer, nodes=1).source == "reference"
        self.probed(customer, backend, seconds=60, epoch=3)
        found = self.estimate(customer, nodes=1, epochs=10)
        assert (found.source, found.runs) == ("probe", 1)
        assert found.p50_seconds == pytest.approx(200, abs=1)
        more = self.estimate(customer, nodes=2, epochs=10)
        assert more.p50_seconds == pytest.approx(200 / 2**0.8, abs=1)
        assert more.p90_seconds > found.p90_seconds / 2

    def test_the_moment_of_the_last_whole_epoch_counts(self, customer, backend):
        job = self.probed(customer, backend, seconds=60, epoch=2)
        point = {"job": job, "attempt": 1, "name": "loss", "value": 1.0}
        MetricPoint.objects.create(step=1, epoch=1.0, at=job.started_at + timedelta(seconds=20), **point)
        MetricPoint.objects.create(step=2, epoch=2.0, at=job.started_at + timedelta(seconds=40), **point)
        assert self.estimate(customer, nodes=1, epochs=10).p50_seconds == pytest.approx(200, abs=1)

    def test_a_probe_that_saw_no_epoch_teaches_nothing(self, customer, backend):
        self.probed(customer, backend, epoch=0)
        assert self.estimate(customer).source == "reference"

    def test_a_paid_run_is_believed_before_it(self, customer, backend):
        self.probed(customer, backend)
        TestRunsToLearnFrom().ran(customer, 100, nodes=1)
        assert self.estimate(customer, nodes=1).source == "history"


class TestAccuracy:
    def outcome(self, job: Job, p50: float, actual: float, source: str = "history"):
        return calibration.Outcome(job, source, p50, p50 * 1.5, actual)

    def test_a_job_beside_its_quote(self, customer, backend):
        attempt = customer.started(max_seconds=None)
        attempt.refresh_from_db()
        job = customer.end(attempt, Outcome.COMPLETED, at=attempt.started_at.timestamp() + 130)
        found = calibration.outcome(job)
        assert found.error == pytest.approx(0.3)
        assert found.is_within_p90
        assert calibration.outcome(customer.job()) is None

    def test_week_by_week_and_source_by_source(self, customer):
        now = timezone.now()
        job, old = Job(finished_at=now), Job(finished_at=now - timedelta(days=14))
        rows = calibration.accuracy(
            [
                self.outcome(job, 100, 110),
                self.outcome(job, 100, 70),
                self.outcome(job, 100, 400, source="reference"),
                self.outcome(old, 100, 100),
                self.outcome(old, 100, 10, source="free"),
            ]
        )
        assert [(row.source, row.runs) for row in rows][:3] == [("all", 3), ("history", 2), ("reference", 1)]
        newest = rows[0]
        assert newest.median_error == pytest.approx(0.3)
        assert newest.within_p90 == pytest.approx(2 / 3)
        assert [(row.source, row.runs) for row in rows][3:] == [("all", 1), ("history", 1)]
