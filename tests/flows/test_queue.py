"""Jobs that wait, start and are cancelled, through the API of a console of real processes."""

from datetime import datetime

import pytest

from tests.flows import WHOLE_CONSOLE

pytestmark = WHOLE_CONSOLE


def moment(text):
    return datetime.fromisoformat(text)


def whole_cluster(tag):
    """Return the choices for a run that takes the whole cluster of two cores."""
    return {"tag": tag, "node_spec": "medium", "nodes": 1}


def test_a_job_waits_says_why_and_starts_when_the_one_before_it_ends(console, buyer):
    jobs = [buyer.start(**whole_cluster(f"turn-{number}")) for number in range(3)]
    buyer.running(jobs[0])
    for ahead, job in enumerate(jobs[1:]):
        waiting = buyer.until(job, lambda data: "Waiting for 1 free node of Medium" in data["waiting_for"])
        assert "0 are free now." in waiting["waiting_for"]
        assert (f"{ahead} job is ahead" if ahead else "next in the queue") in waiting["waiting_for"]
    # Beat sends nothing meanwhile, so no reconciliation starts a job: each starts by the end of the one before it.
    (beat,) = console.programs("celery", "beat")
    beat.suspend()
    try:
        for number, job in enumerate(jobs):
            buyer.running(job)
            console.release(f"turn-{number}")
            buyer.ended(job)
    finally:
        beat.resume()


def test_lines_arrive_while_they_are_written_and_a_cancelled_job_is_charged_until_its_code_has_saved(console, buyer):
    source = """
import os, pathlib, signal, sys, time
def leave(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
workspace = pathlib.Path(os.environ["WORKSPACE"])
for number in range(3):
    print("line", number, flush=True)
    while not (workspace / f"seen-{number}").exists():
        time.sleep(0.01)
"""
    buyer.call("PUT", "workspaces/main/files/polite.py", content=source.encode())
    # The stream is opened while the job may still wait or start, and each line is answered before the next is printed.
    job = buyer.start("polite", code_path="polite.py")
    text, number = "", 0
    for _name, data in buyer._stream(f"jobs/{job}/logs/"):
        text += data["text"]
        while f"line {number}\n" in text:
            if number < 2:
                (console.workspace() / f"seen-{number}").touch()
            else:
                assert buyer.call("POST", f"jobs/{job}/cancel/")["state"] == "stopping"
            number += 1
        if data["eof"]:
            break
    assert text.startswith("line 0\nline 1\nline 2\nsaved\n")
    ended = buyer.ended(job)
    assert (ended["state"], ended["reason"]) == ("cancelled", "cancelled")
    took = (moment(ended["finished_at"]) - moment(ended["started_at"])).total_seconds()
    lines = buyer.bill(job)["lines"]
    # The quantity is in node hours, of two nodes.
    assert float(lines["time_used"]["quantity"]) * 3600 / 2 == pytest.approx(took, abs=0.01)
    assert console.supervisors() == []
