"""The commands of notebooks against Django."""

import pytest

from jobs import notebooks
from jobs.models import Job
from runtime.specs import Outcome
from tests.factories.jobs import start

pytestmark = pytest.mark.django_db


class StartsNotebook:
    """Takes the place of `shell.pauses`, the list to which `shell` appends each pause's seconds instead of waiting.

    At the program's first pause the notebook starts, at the next JupyterLab listens.
    """

    def __init__(self, customer, monkeypatch):
        self.customer, self.monkeypatch = customer, monkeypatch

    def append(self, _seconds):
        job = Job.objects.get()
        if job.state == "queued":
            self.customer.run(job)
        else:
            # Anything but None means that there is something to connect to.
            self.monkeypatch.setattr(notebooks, "socket_of", lambda job: job.state == "running" or None)


def test_a_notebook_is_bought_opened_extended_and_stopped(shell, customer, monkeypatch):
    shell("notebook", "start", "--hours", "2", "--max-ceiling", "0.01", status=5)
    shell("notebook", "start", status=2)  # there is no terminal to ask on
    shell("notebook", "start", "--job", "12", "--yes", status=1)
    assert "inspected_job: This job does not exist." in shell.stderr
    assert not Job.objects.exists()
    shell.pauses = StartsNotebook(customer, monkeypatch)
    started = shell(
        "notebook", "start", "--node-spec", "nano", "--hours", "2", "--idle-minutes", "20", "--ceiling", "1.00", "--yes"
    )
    job = Job.objects.get()
    assert f"/notebooks/{job.pk}/open/" in started
    assert "costs at least 0.05 USD" in started
    purchase = job.order.quote.purchase
    assert (purchase["idle_seconds"], purchase["node_spec"], job.order.quote.ceiling_minor) == (1200, "nano", 100)
    assert [each["id"] for each in shell.json("notebook", "list")] == [job.pk]
    assert job.name in shell("notebook", "list")
    shell("notebook", "extend", job.pk, "--hours", "1", "--max-ceiling", "0.01", status=5)
    assert "More time adds at most 0.90 USD." in shell.stdout
    assert "This extension costs up to 0.90 USD, above your limit of 0.01 USD." in shell.stderr
    assert shell.json("notebook", "extend", job.pk, "--hours", "1", "--yes")["ceiling_minor"] == 190  # an hour costs 90
    assert shell.json("notebook", "stop", job.pk)["state"] == "stopping"


def test_after_ctrl_c_a_bought_notebook_goes_on_and_the_program_says_how_to_stop_it(shell):
    class Interrupts:
        def append(self, _seconds):
            raise KeyboardInterrupt

    shell.pauses = Interrupts()
    shell("notebook", "start", "--yes", status=130)
    assert f"Stop it: trainyard notebook stop {Job.objects.get().pk}" in shell.stdout


def test_a_notebook_that_ends_before_it_runs_is_a_failure(shell, customer):
    class FailsNotebook:
        def append(self, _seconds):
            job = Job.objects.latest("pk")
            start(job)
            attempt = job.attempts.get()
            customer.backend.start(attempt.run_name)
            customer.end(attempt, Outcome.CODE_FAILED, message="This image has no JupyterLab.")

    shell.pauses = FailsNotebook()
    printed = shell("notebook", "start", "--yes", status=3)
    assert "ended before it ran" in printed
    assert "Open it" not in printed
    assert shell.json("notebook", "start", "--yes", status=3)["state"] == "failed"
