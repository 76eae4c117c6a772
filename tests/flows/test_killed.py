"""`kill -9` of any part of the console in the middle of a run: the run goes on, is charged once, nothing is left."""

from __future__ import annotations

import signal

import psutil
import pytest

from runtime.backends import identity
from tests.console.processes import wait_for
from tests.flows.console import Buyer, Console

pytestmark = pytest.mark.flow

PROGRAMS = {
    "web": ["gunicorn"],
    "live": ["manage.py", "live"],
    "worker": ["celery", "worker"],
    "beat": ["celery", "beat"],
    "watcher": ["manage.py", "watch_runs"],
    "services": ["manage.py", "hold_services"],
}
SERVERS = {"postgres": "postgres", "redis": "redis-server"}


def victims(console: Console, name: str) -> list[psutil.Process]:
    if name in SERVERS:
        return [process for process in console.embedded.processes() if process.name() == SERVERS[name]]
    return console.programs(*PROGRAMS[name])


def charged_once(console: Console, buyer: Buyer, job: int) -> None:
    """One attempt, one process from its start to its end, one charge, and a receipt that says so."""
    data = buyer.job(job)
    assert [attempt["number"] for attempt in data["attempts"]] == [1]
    assert (data["state"], data["reason"]) == ("succeeded", "completed")
    assert buyer.log(job).count("began") == 1
    bill = buyer.bill(job)
    assert set(bill["lines"]) >= {"queue", "start", "time_used"}
    assert "platform_fault" not in bill["lines"]
    assert 0 < bill["total_minor"] == data["cost_minor"] <= data["ceiling_minor"]
    charges = console.query("SELECT count(*) FROM billing_transaction WHERE description LIKE %s", f"#{job} %")
    assert charges == [(1,)]
    assert console.query("SELECT count(*) FROM jobs_jobevent WHERE job_id = %s AND kind = 'settled'", job) == [(1,)]
    assert buyer.call("GET", "wallet/")["held_minor"] == 0
    assert console.supervisors() == []


@pytest.mark.parametrize("name", [*PROGRAMS, *SERVERS])
def test_one_part_is_killed(console: Console, buyer: Buyer, name: str) -> None:
    job = buyer.start(f"one-{name}")
    buyer.running(job)
    found = victims(console, name)
    assert found
    console.kill(*found)
    # At once, while that part is away: the end of the run must not be missed either.
    console.release(f"one-{name}")
    buyer.ended(job)
    wait_for(lambda: victims(console, name) and console.is_ready(), 60)
    assert not set(victims(console, name)) & set(found)
    charged_once(console, buyer, job)


def test_everything_is_killed_and_the_run_goes_on(console: Console, buyer: Buyer) -> None:
    job = buyer.start("all")
    buyer.running(job)
    before = console.supervisors()
    assert len(before) == 2
    console.kill_all()
    assert console.processes() == []
    assert console.supervisors() == before
    console.up()
    assert buyer.job(job)["state"] == "running"
    assert console.supervisors() == before
    assert len(console.programs("supervisor.supervisord")) == 1
    assert console.up_again().returncode == 0
    console.release("all")
    buyer.ended(job)
    charged_once(console, buyer, job)


def test_the_run_ends_while_everything_is_dead(console: Console, buyer: Buyer) -> None:
    job = buyer.start("alone")
    buyer.running(job)
    console.kill_all()
    console.release("alone")
    wait_for(lambda: console.supervisors() == [])
    console.up()
    data = buyer.ended(job)
    # The clock is the backend's: the time that the console was away is not the run's.
    ran = console.query("SELECT extract(epoch FROM finished_at - started_at)::float FROM jobs_job WHERE id = %s", job)
    assert data["state"] == "succeeded"
    assert ran[0][0] < 15
    assert buyer.call("GET", f"jobs/{job}/metrics/")["metrics"] == {"loss": [[1, 0.5]]}
    charged_once(console, buyer, job)


def test_a_deadline_needs_no_console(console: Console, buyer: Buyer) -> None:
    quote = buyer.call("POST", "quotes/", json=buyer.form("never"))
    # The shortest that is sold is a minute; a test has less time than that.
    console.query("UPDATE billing_quote SET deadline_seconds = 4 WHERE id = %s", quote["id"])
    job = buyer.call("POST", "orders/", json={"quote": quote["id"]})["job"]
    buyer.running(job)
    console.kill_all()
    assert console.supervisors()
    wait_for(lambda: console.supervisors() == [])
    console.up()
    data = buyer.ended(job)
    assert (data["state"], data["reason"]) == ("failed", "time_limit")
    ran = console.query("SELECT extract(epoch FROM finished_at - started_at)::float FROM jobs_job WHERE id = %s", job)
    assert 2 < ran[0][0] <= 4.1
    assert 0 < buyer.bill(job)["total_minor"] <= quote["ceiling_minor"]
    assert buyer.call("GET", "wallet/")["held_minor"] == 0


def test_a_node_is_killed_and_the_run_is_started_again_free(console: Console, buyer: Buyer) -> None:
    job = buyer.start("node")
    buyer.running(job)
    pid, started = console.supervisors()[0]
    assert identity.send(pid, started, signal.SIGKILL)
    buyer.until(job, lambda data: len(data["attempts"]) == 2 and data["state"] == "running")
    console.release("node")
    data = buyer.ended(job)
    assert buyer.log(job, attempt=2).startswith("began 1")
    assert [attempt["reason"] for attempt in data["attempts"]] == ["node_lost", "completed"]
    lines = buyer.bill(job)["lines"]
    assert lines["platform_fault"]["amount_minor"] == 0
    assert float(lines["platform_fault"]["quantity"]) > 0
    second = console.query(
        "SELECT extract(epoch FROM finished_at - started_at)::float FROM jobs_attempt WHERE job_id = %s AND number = 2",
        job,
    )
    assert float(lines["time_used"]["quantity"]) * 3600 / 2 == pytest.approx(second[0][0], abs=0.01)
    assert console.supervisors() == []
