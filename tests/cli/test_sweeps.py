"""The commands of sweeps against Django."""

import json

import pytest

from jobs.models import Sweep
from jobs.sweeps import progress

pytestmark = pytest.mark.django_db
PLAN = {"space": {"LR": {"type": "categorical", "choices": [0.1, 0.2]}}, "method": "grid", "trials": 2}
OBJECTIVE = {"metric": "accuracy", "goal": "maximize"}


@pytest.fixture
def sweep_file(project, customer):
    path = project / "sweep.json"
    path.write_text(json.dumps(customer.form(nodes=1) | PLAN | {"objective": OBJECTIVE}))
    return path


class EndsTrials:
    """Replaces `shell.pauses`: at each pause of the watching program the open trials end, and the next start."""

    def __init__(self, sweeper):
        self.sweeper = sweeper

    def append(self, _seconds):
        sweep = Sweep.objects.get()
        progress.advance(sweep_pk=sweep.pk)  # at the first pause: orders the first trial
        for trial in sweep.trials.filter(outcome=""):
            self.sweeper.run(trial, 0.5 + trial.number / 10)
        progress.advance(sweep_pk=sweep.pk)  # stores their outcomes, and orders the next


def test_a_sweep_is_quoted_bought_from_a_file_and_watched_until_its_best_trial(shell, sweep_file, sweeper):
    priced = shell.json("sweep", "quote", sweep_file)
    assert (priced["trials"], Sweep.objects.exists()) == (2, False)
    assert "high estimate" in shell("sweep", "quote", sweep_file)
    shell.pauses = EndsTrials(sweeper)
    shell("sweep", "buy", sweep_file, "--yes", "--wait")
    assert "1 of at most 2 trials · best accuracy 0.5" in shell.stdout
    sweep = Sweep.objects.get()
    assert (sweep.reason, sweep.quote.ceiling_minor) == ("completed", priced["ceiling_minor"])
    shown = shell.json("sweep", "show", sweep.pk)
    assert [trial["is_best"] for trial in shown["trials"]] == [False, True]
    assert shown["best"]["parameters"] == {"LR": 0.2}
    assert "LR=0.2" in shell("sweep", "watch", sweep.pk)
    assert [each["id"] for each in shell.json("sweep", "list")] == [sweep.pk]
    assert sweep.name in shell("sweep", "list")
    shell("sweep", "extend", sweep.pk, "--trials", 2, "--yes", status=1)
    assert "tried all" in shell.stderr  # the grid has only two
    shell("sweep", "stop", sweep.pk, status=1)
    assert "already ended" in shell.stderr


def test_an_ended_sweep_is_extended(shell, sweeper):
    sweep = sweeper.buy(trials=1)
    sweeper.finish(sweep)
    shell("sweep", "extend", sweep.pk, "--ceiling", "1000.00", "--max-ceiling", "0.01", status=5)
    bought = shell.json("sweep", "extend", sweep.pk, "--trials", 3, "--yes")
    assert bought["trials_total"] == 3
    assert Sweep.objects.get(pk=bought["id"]).extends == sweep


def test_a_stopped_sweep_is_watched_to_its_end(shell, sweep_file):
    number = shell.json("sweep", "buy", sweep_file, "--max-ceiling", "1000")["id"]
    assert shell.json("sweep", "stop", number)["state"] == "stopping"
    progress.advance(sweep_pk=number)  # ends it
    assert shell.json("sweep", "watch", number, status=4)["reason"] == "stopped"


def test_a_sweep_is_read_from_toml_and_a_file_that_describes_none_is_refused(shell, project, customer):
    for name, text in (
        ("a.toml", "trials ="), ("a.toml", "at = 2026-01-01"), ("a.toml", "low = nan"), ("a.json", "["),
        ("a.json", "[]"),
    ):  # fmt: skip
        (project / name).write_text(text)
        shell("sweep", "quote", name, status=2)
        assert name in shell.stderr
    shell("sweep", "quote", "missing.toml", status=2)
    form = customer.form(nodes=1)
    lines = [f"{name} = {json.dumps(value)}" for name, value in form.items() if not isinstance(value, dict)]
    lines += ['method = "random"', "trials = 3", 'objective = {metric = "loss", goal = "minimize"}']
    lines += ["[space]", 'LR = {type = "float", low = 1e-4, high = 0.1, log = true}']
    (project / "sweep.toml").write_text("\n".join(lines))
    assert shell.json("sweep", "quote", "sweep.toml")["trials"] == 3
