"""`kill -9` of any part of the console in the middle of a run: the run goes on, is charged once, nothing is left."""

import signal
import time

import psutil
import pytest

from runtime import pids
from tests.console.processes import wait_for
from tests.flows import WHOLE_CONSOLE

pytestmark = WHOLE_CONSOLE

PROGRAMS = {
    "web": ["console.serving.server"],
    "worker": ["worker", "worker@%h"],
    "dispatcher": ["worker", "dispatcher@%h"],
    "beat": ["celery", "beat"],
    "watcher": ["manage.py", "watch_runs"],
    "services": ["console.supervision.services"],
    "sandbox": ["manage.py", "payments_sandbox"],
}
SERVERS = {"postgres": "postgres", "redis": "redis-server"}


def victims(console, name):
    """Return the processes of a part of the console: a program or a server."""
    if name in SERVERS:
        return [process for process in console.embedded.processes() if process.name() == SERVERS[name]]
    return console.programs(*PROGRAMS[name])


def ran_seconds(console, job):
    """Return how long the last attempt of a job ran."""
    ran = "SELECT extract(epoch FROM finished_at - started_at)::float FROM jobs_attempt WHERE job_id = %s"
    return console.query(f"{ran} ORDER BY number DESC LIMIT 1", job)[0][0]


def assert_charged_once(console, buyer, job):
    """Check that a job had one attempt, whose process ran from start to end, and one charge with a right receipt."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",  # all parts of a group are away at once
    [("web", "beat", "sandbox", "dispatcher", "watcher", "services"), ("worker", "redis", "postgres")],
    ids=lambda names: names[0],
)
def test_some_parts_are_killed(console, buyer, names):
    tag = names[0]
    job = buyer.start(tag)
    buyer.running(job)
    killed = {name: victims(console, name) for name in names}
    # Without forks of a program, which have its command line and end with it
    parents = [one for group in killed.values() for one in group if one.parent() not in group]
    assert len(parents) == len(names)
    gone = [*parents, *(child for parent in parents for child in parent.children(recursive=True))]
    for parent in parents:
        parent.kill()
    assert psutil.wait_procs(gone, timeout=15)[1] == []  # what a parent started ends with it
    # End the run at once, while those parts are away: its end must not be missed.
    console.release(tag)
    buyer.ended(job)
    wait_for(lambda: all(victims(console, name) for name in names) and console.is_ready(), 60)
    for name in names:
        assert not set(victims(console, name)) & set(gone)
    assert_charged_once(console, buyer, job)


@pytest.mark.slow
def test_runs_go_on_and_end_while_everything_is_dead(console, buyer, slurm_spec):
    quote = buyer.call("POST", "quotes/", json=buyer.form("never", nodes=1))  # its run is never released
    # The shortest deadline on sale is a minute, too long for a test. 12 s are enough to see the run on a busy machine.
    console.query("UPDATE billing_quote SET deadline_seconds = 12 WHERE id = %s", quote["id"])
    jobs = {"local": buyer.start("local")}
    if slurm_spec:
        jobs["slurm"] = buyer.start("slurm", node_spec=slurm_spec)
    for job in jobs.values():
        buyer.running(job)
    limited = buyer.call("POST", "orders/", json={"quote": quote["id"]})["job"]
    buyer.running(limited)
    console.kill_all()
    assert console.processes() == []
    console.release("slurm")
    # Only the two nodes of the local run are left. The run with 12 s ends at its deadline, which needs no console.
    wait_for(lambda: len(console.supervisors()) == 2)
    before = console.supervisors()
    console.up()
    assert buyer.job(jobs["local"])["state"] == "running"
    assert console.supervisors() == before
    assert len(console.programs("supervisor.supervisord")) == 1
    data = buyer.ended(limited)
    assert (data["state"], data["reason"]) == ("failed", "time_limit")
    assert 2 < ran_seconds(console, limited) <= 12.1  # it did not end with the console, but at its deadline
    assert 0 < buyer.bill(limited)["total_minor"] <= quote["ceiling_minor"]

    console.down()
    assert "Stopped." in console.output.read_text()
    assert console.processes() == []
    released_at = time.time()
    console.release("local")
    wait_for(lambda: console.supervisors() == [])
    console.up()
    for job in jobs.values():
        buyer.ended(job)
    # The backend dates the end of the run, so the time without a console is not charged.
    ((finished_at,),) = console.query(
        "SELECT extract(epoch FROM finished_at)::float FROM jobs_job WHERE id = %s", jobs["local"]
    )
    assert finished_at - released_at < 10
    assert buyer.call("GET", f"jobs/{jobs['local']}/metrics/")["metrics"] == {"loss": [[1, 0.5]]}
    for job in jobs.values():
        assert_charged_once(console, buyer, job)


def test_a_run_whose_node_is_killed_is_retried_free(console, buyer):
    job = buyer.start("node")
    buyer.running(job)
    pid, started = console.supervisors()[0]
    assert pids.send(pid, started, signal.SIGKILL)
    buyer.until(job, lambda data: len(data["attempts"]) == 2 and data["state"] == "running")
    console.release("node")
    data = buyer.ended(job)
    assert buyer.log(job, attempt=2).startswith("began 1")
    assert [attempt["reason"] for attempt in data["attempts"]] == ["node_lost", "completed"]
    lines = buyer.bill(job)["lines"]
    assert lines["platform_fault"]["amount_minor"] == 0
    assert float(lines["platform_fault"]["quantity"]) > 0
    # The quantity is in node hours, of two nodes.
    assert float(lines["time_used"]["quantity"]) * 3600 / 2 == pytest.approx(ran_seconds(console, job), abs=0.01)
    assert console.supervisors() == []
