"""A whole console on a Kubernetes cluster, from purchase to receipt; its worker and watcher die in the middle."""

import json

import pytest

from tests.console.processes import wait_for
from tests.flows.console import BARE_IMAGE, WAIT, Buyer, Console, served
from tests.flows.test_killed import assert_charged_once
from tests.kubernetes.fixtures import open_site
from tests.kubernetes.harness import KubernetesHarness
from tests.kubernetes.sites import IMAGE

pytestmark = [pytest.mark.flow, pytest.mark.cores(2), pytest.mark.slow]


@pytest.fixture
def flow(short_folders):
    """A cluster and a console that uses it."""
    folder = short_folders()
    for site in open_site(folder):
        clusters = {"default": site.settings(images={BARE_IMAGE: IMAGE})}
        console = Console(site.root / "var", folder / "images", TRAINYARD_CLUSTERS=json.dumps(clusters))
        for running in served(console):
            yield site, running
        if site.real:
            KubernetesHarness(site).close()  # deletes the runs, since other tests use the same namespace


def test_a_purchase_survives_the_worker_and_the_watcher(flow):
    site, console = flow
    buyer = Buyer(console)
    buyer.patience_seconds = 240 if site.real else buyer.patience_seconds

    def write(name, text):
        """Write into the customer's workspace, also on machines that do not share the console's storage."""
        site.place({str(console.workspace().relative_to(site.root) / name): text})

    buyer.call("PUT", "workspaces/main/files/wait.py", content=WAIT.encode())
    write("wait.py", WAIT)
    job = buyer.start("outlives")  # a run of two nodes that ends when the file `go-outlives` exists
    buyer.running(job)
    wait_for(lambda: "began" in buyer.log(job), buyer.patience_seconds)
    # Words in the command line of each; %h is Celery's placeholder for the machine's name.
    programs = {"worker": ["worker@%h"], "dispatcher": ["dispatcher@%h"], "watcher": ["manage.py", "watch_runs"]}
    for words in programs.values():
        processes = console.programs(*words)
        assert processes
        console.kill(*processes)
    write("go-outlives", "")  # the run ends while nothing watches it
    buyer.ended(job)
    assert_charged_once(console, buyer, job)
    assert buyer.log(job, rank=1).endswith("epoch 1/1 loss 0.5\n")
    wait_for(lambda: all(console.programs(*words) for words in programs.values()), 60)  # they are started again
    buyer.close()
