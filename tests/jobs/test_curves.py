"""The curves of a run's metrics, with epochs, times and costs, and what a value cost in comparable runs."""

import csv
import json
import time

import pytest
from django.urls import reverse

from billing.models import Quote
from jobs import cost_analysis, curves, reconciliation, telemetry
from jobs.models import Job, MetricPoint
from jobs.points import thinned_indexes
from runtime.specs import Outcome
from tests.factories.jobs import Customer

EPOCHS, STEPS = 5, 24


def reloaded(job):
    return Job.objects.get(pk=job.pk)


def report_metrics(customer, attempt, records):
    """Let the run append records to its metrics file, and read them."""
    folder = customer.backend.run_folder(attempt.run_name) / "run"
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    telemetry.ingest(attempt=attempt)


def test_a_script_that_restarts_its_step_count_shows_every_point_in_order_with_its_cost(customer, client):
    began = time.time() - 1000
    attempt = customer.started(at=began)
    records = [
        {"epoch": epoch, "step": step, "loss": 10 - epoch - step / 100, "time": began + 100 * epoch + 4 * step}
        for epoch in range(1, EPOCHS + 1)
        for step in range(STEPS)
    ]
    report_metrics(customer, attempt, records[:70])  # ends within the third epoch
    client.force_login(customer.membership.user)
    address = reverse("api_job_curves", args=[attempt.job_id])
    first = client.get(address).json()
    report_metrics(customer, attempt, records[70:])
    rest = client.get(address, {"after": first["last"]}).json()
    (before,), (after,) = first["curves"], rest["curves"]
    curve = {name: before[name] + after[name] for name in before if isinstance(before[name], list)}
    assert curve["value"] == [record["loss"] for record in records]
    assert curve["reported_step"] == [record["step"] for record in records]
    assert curve["epoch"] == [record["epoch"] for record in records]
    assert curve["step"] == sorted(set(curve["step"]))
    assert curve["seconds"] == pytest.approx([record["time"] - began for record in records], abs=0.01)
    hourly = float(attempt.job.order.quote.terms["hourly"])
    costs = [2 * hourly * seconds / 3600 for seconds in curve["seconds"]]  # two nodes
    assert curve["cost_minor"] == pytest.approx(costs, abs=0.01)
    assert (before["better"], first["is_free"], first["kept_every"]) == ("lower", False, 1)
    rows = list(csv.DictReader(client.get(reverse("job_points_csv", args=[attempt.job_id])).text.splitlines()))
    assert [float(row["value"]) for row in rows] == curve["value"]
    page = client.get(reverse("job_points", args=[attempt.job_id]), {"curve": "loss", "page": 2}).text
    assert "<td>loss</td>" in page


def test_a_reported_time_outside_of_the_run_counts_at_its_edge_and_a_fault_costs_nothing(customer):
    began = time.time() - 1000
    attempt = customer.started(at=began)
    # A record without a time gets the time at which it is read, here after the end of the run.
    report_metrics(customer, attempt, [{"loss": 1, "time": began - 500}, {"loss": 1, "time": began + 100}, {"loss": 2}])
    assert curves.curves(reloaded(attempt.job)).curves[0].cost_minor[1] > 0
    customer.end(attempt, Outcome.NODE_LOST, at=began + 200)
    (curve,) = curves.curves(reloaded(attempt.job)).curves
    assert curve.seconds == pytest.approx([0, 100, 200], abs=0.1)
    assert curve.cost_minor == [0, 0, 0]


def test_a_long_curve_is_thinned_and_keeps_its_peaks_and_its_end():
    values = [float(place % 100) for place in range(10_001)]
    values[4321], values[8765] = -1.0, 1000.0
    places = thinned_indexes(values, 100)
    assert len(places) <= 101  # the limit and the end
    assert {4321, 8765, 10_000} <= set(places)
    assert places == sorted(places)
    assert thinned_indexes(values[:100], 100) == list(range(100))


def test_a_curve_with_too_many_points_to_store_is_thinned_over_its_whole_length(customer, monkeypatch):
    monkeypatch.setattr(telemetry, "MAX_POINTS", 100)
    attempt = customer.started()
    for begun in range(0, 500, 25):
        report_metrics(customer, attempt, [{"loss": step, "step": step} for step in range(begun, begun + 25)])
    found = curves.curves(reloaded(attempt.job))
    steps = found.curves[0].step
    assert found.kept_every == 8  # of 500 points, every fourth would still be more than 100
    assert steps == list(range(0, 500, 8))


def test_lines_of_one_read_get_different_times(customer):
    attempt = customer.started(at=time.time() - 1000)
    customer.backend.write(attempt.run_name, "".join(f"step {step} loss 1\n" for step in range(5)))
    telemetry.ingest(attempt=attempt)
    seconds = curves.curves(reloaded(attempt.job)).curves[0].seconds
    assert seconds == sorted(set(seconds))
    assert seconds[-1] - seconds[0] < telemetry.READ_DELAY_SECONDS


def test_the_name_of_a_curve_says_which_values_are_better():
    better = {"test_accuracy": "higher", "train/loss": "lower", "lr": "", "accuracy_loss": "lower"}
    assert {name: curves.better(name) for name in better} == better


def test_curves_of_test_and_validation_data_are_offered_first(customer):
    """They come first among the curves where higher is better, and among the losses after these.

    A curve such as `value_loss`, of reinforcement learning, is no curve of validation data.
    """
    job = customer.started().job
    for name in ("value_loss", "val_loss", "test_accuracy", "policy_loss", "eval/loss", "accuracy", "lr"):
        MetricPoint.objects.create(job=job, attempt=1, name=name, step=1, value=0.5, at=job.queued_at)
    names = ["test_accuracy", "accuracy", "eval/loss", "val_loss", "policy_loss", "value_loss"]
    assert cost_analysis.curve_names(reloaded(job)) == names


def test_runs_of_one_organization_are_compared(customer, backend, client):
    jobs = [customer.started(lr=lr).job for lr in ("0.1", "0.2")]
    for place, job in enumerate(jobs):
        MetricPoint.objects.create(job=job, attempt=1, name="accuracy", step=1, value=0.5 + place / 4, at=job.queued_at)
    client.force_login(customer.membership.user)
    address = reverse("job_compare")
    both = f"{jobs[0].pk},{jobs[1].pk}"
    selected = client.post(reverse("jobs_compare"), {"job": [job.pk for job in jobs]})
    assert selected["Location"] == f"{address}?jobs={both.replace(',', '%2C')}"
    page = client.get(address, {"jobs": f"{both},0{jobs[0].pk}"}).text  # the last number repeats the first run
    assert page.count(f'data-from="/api/v1/jobs/{jobs[0].pk}/curves/"') == 1
    # The address of a curve, both accuracies, and the learning rate in which the runs differ.
    for part in (f'data-from="/api/v1/jobs/{jobs[1].pk}/curves/"', ">0.75<", ">0.5<", ">0.2<"):
        assert part in page
    tab = client.get(reverse("job_metrics", args=[jobs[0].pk])).text
    assert f'name="jobs" value="{jobs[1].pk}"' in tab
    theirs = Customer(backend).started().job
    for wrong in (f"{both},{theirs.pk}", "x", "-1", "9" * 30, "0"):
        assert client.get(address, {"jobs": wrong}).status_code == 404
    assert "No runs chosen" in client.get(address).text
    for name in ("job_metrics", "job_points", "job_points_csv", "api_job_curves"):
        assert client.get(reverse(name, args=[theirs.pk])).status_code == 404


# --- Costs of values and of nodes -------------------------------------------------------------------------------------


def ran(customer, seconds, values, **changes):
    """A run that completed after `seconds`, with these accuracies, one every ten seconds."""
    began = time.time() - 2000
    attempt = customer.started(at=began, **changes)
    records = [{"accuracy": value, "time": began + 10 * (place + 1)} for place, value in enumerate(values)]
    report_metrics(customer, attempt, records)
    return customer.end(attempt, Outcome.COMPLETED, at=began + seconds)


def test_the_cost_of_a_value_is_compared_between_the_runs_of_a_script(customer, client):
    slow = ran(customer, 100, [0.2, 0.4, 0.6, 0.5])
    fast = ran(customer, 100, [0.5, 0.9], nodes=1)
    customer.write("other.py", "print(1)")
    other = ran(customer, 100, [0.99], code_path="other.py")
    free = ran(customer, 100, [0.99])
    Quote.objects.filter(order__job=free).update(ceiling_minor=0)
    goal, found = cost_analysis.costs_of_value(cost_analysis.comparable_jobs(reloaded(slow), limit=7), "accuracy")
    assert goal == 0.6, "the best value of the first run"
    assert [each.job.pk for each in found] == [slow.pk, fast.pk]
    assert [each.reached_seconds for each in found] == pytest.approx([30, 20], abs=0.1)
    hourly = float(slow.order.quote.terms["hourly"])
    assert [each.reached_minor for each in found] == pytest.approx([hourly * 60 / 3600, hourly * 20 / 3600], abs=0.01)
    client.force_login(customer.membership.user)
    page = client.get(reverse("job_cost", args=[slow.pk]), {"curve": "accuracy", "target": "0.7"}).text
    assert page.count("not reached") == 1
    assert f"#{other.pk}<" not in page
    assert (
        "Enter a number" in client.get(reverse("job_cost", args=[slow.pk]), {"curve": "accuracy", "target": "x"}).text
    )


def test_a_run_is_priced_on_other_numbers_of_nodes(customer):
    job = ran(customer, 600, [0.5])
    bases = {each.nodes: (each.basis, round(each.seconds)) for each in cost_analysis.alternatives(reloaded(job))}
    # Twice the nodes are assumed to be 2 ** 0.8 times as fast.
    assert bases == {1: ("assumed", 1045), 2: ("own", 600), 4: ("assumed", 345)}
    ran(customer, 900, [0.5], nodes=1)
    found = {each.nodes: each for each in cost_analysis.alternatives(reloaded(job))}
    assert {nodes: each.basis for nodes, each in found.items()} == {1: "measured", 2: "own", 4: "scaled"}
    assert found[2].efficiency == pytest.approx(900 / 600 / 2)
    assert found[2].cost_minor == Job.objects.get(pk=job.pk).order.hold.metered_minor
    assert found[1].cost_minor < found[2].cost_minor < found[4].cost_minor


def test_time_that_a_hang_made_free_is_valued_at_the_price_of_all_its_nodes(customer):
    began = time.time() - 2000
    attempt = customer.started(at=began)
    customer.backend.hang(attempt.run_name, at=began + 500, progress_at=began + 300)
    reconciliation.reconcile()
    free = {each.rule: each for each in cost_analysis.free_times(reloaded(attempt.job))}
    hourly = float(attempt.job.order.quote.terms["hourly"])
    assert float(free["hang"].worth_minor) == pytest.approx(2 * 200 / 3600 * hourly, rel=0.01)  # 2 nodes
