"""Waiting, starting, cancelling through the API of a console of real processes."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Any

import httpx
import pytest

from jobs.demo import DemoFailed
from tests.flows.console import Buyer, Console

pytestmark = pytest.mark.flow


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def whole(tag: str) -> dict[str, Any]:
    """A run that takes the whole cluster of two cores."""
    return {"tag": tag, "node_spec": "medium", "nodes": 1}


def test_a_job_waits_says_why_and_starts_when_the_one_before_it_ends(console: Console, buyer: Buyer) -> None:
    jobs = [buyer.start(**whole(f"turn-{number}")) for number in range(3)]
    buyer.running(jobs[0])
    for ahead, job in enumerate(jobs[1:]):
        told = buyer.until(job, lambda data: "Waiting for 1 free node of Medium" in data["waiting_for"])
        assert "0 are free now." in told["waiting_for"]
        assert f"{ahead} job" in told["waiting_for"]
    waits = []
    for number, (job, following) in enumerate(pairwise(jobs)):
        console.release(f"turn-{number}")
        ended = buyer.ended(job)
        started = buyer.running(following)
        claimed = moment(started["attempts"][0]["claimed_at"])
        waits.append((claimed - moment(ended["finished_at"])).total_seconds())
    console.release("turn-2")
    buyer.ended(jobs[2])
    # Pushed from the end of the one to the start of the next: a sweep every 5 s would need luck for this, twice.
    assert max(waits) < 2
    assert sum(waits) < 3


def test_a_waiting_job_is_cancelled_at_once_and_costs_nothing(console: Console, buyer: Buyer) -> None:
    first = buyer.start(**whole("holds"))
    buyer.running(first)
    second = buyer.start(**whole("waits"))
    cancelled = buyer.call("POST", f"jobs/{second}/cancel/")
    assert (cancelled["state"], cancelled["cost_minor"]) == ("cancelled", 0)
    assert buyer.bill(second)["total_minor"] == 0
    with pytest.raises(DemoFailed, match=r"409.*already_ended"):
        buyer.call("POST", f"jobs/{second}/cancel/")
    console.release("holds")
    assert buyer.ended(first)["state"] == "succeeded"


def test_a_running_job_is_cancelled_with_a_grace_and_charged_for_its_time(console: Console, buyer: Buyer) -> None:
    source = """
import os, signal, sys
def leave(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
while True:
    signal.pause()
"""
    buyer.call("PUT", "workspaces/main/files/polite.py", content=source.encode())
    job = buyer.start("polite", code_path="polite.py")
    running = buyer.running(job)
    wait_for_line(buyer, job, "ready")
    answer = buyer.call("POST", f"jobs/{job}/cancel/")
    assert answer["state"] == "stopping"
    ended = buyer.ended(job)
    assert (ended["state"], ended["reason"]) == ("cancelled", "cancelled")
    assert "saved" in buyer.log(job)
    took = (moment(ended["finished_at"]) - moment(running["started_at"])).total_seconds()
    lines = buyer.bill(job)["lines"]
    assert float(lines["time_used"]["quantity"]) * 3600 / 2 == pytest.approx(took, abs=0.01)
    assert console.supervisors() == []


def wait_for_line(buyer: Buyer, job: int, text: str) -> None:
    """Read the live log until it has the text."""
    for name, data in buyer._stream(f"jobs/{job}/logs/"):
        assert name == "log"
        if text in data["text"]:
            return
    raise AssertionError(f"the log ended without {text!r}")


def test_lines_arrive_while_they_are_written(console: Console, buyer: Buyer) -> None:
    source = """
import os, pathlib, time
workspace = pathlib.Path(os.environ["WORKSPACE"])
for number in range(3):
    print("line", number, flush=True)
    while not (workspace / f"seen-{number}").exists():
        time.sleep(0.01)
"""
    buyer.call("PUT", "workspaces/main/files/chat.py", content=source.encode())
    # The stream is opened while the job may still wait or start, and each line is answered before the next is printed.
    job = buyer.start("chat", code_path="chat.py", nodes=1)
    text, number = "", 0
    for _name, data in buyer._stream(f"jobs/{job}/logs/"):
        text += data["text"]
        while f"line {number}\n" in text:
            (console.workspace() / f"seen-{number}").touch()
            number += 1
        if data["eof"]:
            break
    assert text == "line 0\nline 1\nline 2\n"
    assert buyer.ended(job)["state"] == "succeeded"


def test_a_fault_in_the_code_names_its_rank_and_is_charged(console: Console, buyer: Buyer) -> None:
    source = "import os, sys, time\nprint('hm')\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)\n"
    buyer.call("PUT", "workspaces/main/files/fails.py", content=source.encode())
    ended = buyer.ended(buyer.start("fails", code_path="fails.py"))
    assert (ended["state"], ended["reason"]) == ("failed", "code_failed")
    assert ended["detail"] == "Rank 1 on node 1 exited with code 3."
    assert ended["attempts"][0]["failure"]["last_lines"] == ["hm"]
    assert 0 < ended["cost_minor"] <= ended["ceiling_minor"]


def test_nobody_sees_it_without_a_token(console: Console, buyer: Buyer) -> None:
    job = buyer.start("private", code_path="quick.py")
    buyer.ended(job)
    for path in ("", "logs/", "metrics/", "events/", "environment/", "receipt/", "stream/"):
        answer = httpx.get(f"{console.url}/api/v1/jobs/{job}/{path}")
        assert answer.status_code == 401, path
