"""A whole console on a Kubernetes cluster, from purchase to receipt; its worker and watcher die in the middle."""

from __future__ import annotations

import json
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.backends import images
from tests.console.processes import wait_for
from tests.flows.console import WAIT, Buyer, Console, served
from tests.kubernetes.choice import open_site
from tests.kubernetes.sites import Site
from tests.kubernetes.yard import ClusterYard

pytestmark = pytest.mark.flow

FAILS = "import os, sys\nprint('hm', flush=True)\nsys.exit(3)\n"


class Yard:
    """The console, its customer, and their workspace where pods see it."""

    def __init__(self, site: Site, console: Console) -> None:
        self.site, self.console = site, console
        self.buyer = Buyer(console)
        if site.real:
            self.buyer.patience_seconds = 240
        self.write("wait.py", WAIT)
        self.write("fails.py", FAILS)

    def write(self, name: str, text: str) -> None:
        """A file of the workspace, through the API and to the machines."""
        if name.endswith(".py"):
            self.buyer.call("PUT", f"workspaces/main/files/{name}", content=text.encode())
        inside = self.console.workspace().relative_to(self.site.root)
        self.site.place({str(inside / name): text})


@pytest.fixture(scope="module")
def flow() -> Iterator[Yard]:
    """One console for this file's tests. Short paths: unix sockets need that."""
    folder = Path(tempfile.mkdtemp(prefix="ty-"))
    root = folder / "images"
    venv.create(root / "pytorch", with_pip=False, symlinks=True)
    images.mark_ready(root / "pytorch", "bare")
    for site in open_site(folder):
        clusters = {"default": site.settings()}
        console = Console(site.root / "var", root, TRAINYARD_CLUSTERS=json.dumps(clusters))
        for up in served(console):
            made = Yard(site, up)
            yield made
            made.buyer.http.close()
        if site.real:
            ClusterYard(site).close()  # other tests use the same namespace


def test_a_purchase_outlives_the_worker_and_the_watcher(flow: Yard) -> None:
    console, buyer = flow.console, flow.buyer
    job = buyer.start("outlives")
    buyer.running(job)
    wait_for(lambda: "began" in buyer.log(job), buyer.patience_seconds)
    programs = {"worker": ["celery", "worker"], "watcher": ["manage.py", "watch_runs"]}
    for words in programs.values():
        found = console.programs(*words)
        assert found
        console.kill(*found)
    # At once, while they are away: the end of the run must not be missed.
    flow.write("go-outlives", "")
    ended = buyer.ended(job)
    assert (ended["state"], ended["reason"]) == ("succeeded", "completed")
    assert [attempt["number"] for attempt in ended["attempts"]] == [1]
    assert buyer.log(job).count("began") == 1
    assert buyer.log(job, rank=1).endswith("epoch 1/1 loss 0.5\n")
    bill = buyer.bill(job)
    assert set(bill["lines"]) >= {"queue", "start", "time_used"}
    assert 0 < bill["total_minor"] == ended["cost_minor"] <= ended["ceiling_minor"]
    assert buyer.call("GET", "wallet/")["held_minor"] == 0
    wait_for(lambda: all(console.programs(*words) for words in programs.values()), 60)


def test_a_run_is_cancelled_and_its_time_charged(flow: Yard) -> None:
    job = flow.buyer.start("cancelled")
    flow.buyer.running(job)
    flow.buyer.call("POST", f"jobs/{job}/cancel/")
    ended = flow.buyer.ended(job)
    assert (ended["state"], ended["reason"]) == ("cancelled", "cancelled")
    assert flow.buyer.call("GET", "wallet/")["held_minor"] == 0
    assert [
        pod for pod in flow.site.core.list_namespaced_pod(flow.site.namespace).items if pod.status.phase == "Running"
    ] == []


def test_a_fault_of_the_code_is_told_and_charged(flow: Yard) -> None:
    job = flow.buyer.start("fails", code_path="fails.py", nodes=1)
    ended = flow.buyer.ended(job)
    assert (ended["state"], ended["reason"]) == ("failed", "code_failed"), ended
    assert ended["detail"] == "Rank 0 on node 0 exited with code 3."
    assert ended["attempts"][0]["failure"]["last_lines"] == ["hm"]
    assert 0 <= ended["cost_minor"] <= ended["ceiling_minor"]
