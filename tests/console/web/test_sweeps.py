"""The pages of sweeps: the form, its quote and order, the list of trials, more trials, and stopping."""

import json
import re

import pytest
from django.urls import reverse

from billing.models import Quote
from jobs.models import Sweep
from jobs.sweeps import progress
from runtime.specs import Outcome
from tests.rendered import form_of

HTMX = {"HX-Request": "true"}
ROW = {"type": "float", "low": "", "high": "", "scale": "linear", "step": "", "choices": "", "when": ""}
"""An empty row of the form's table of parameters."""


def form(job, *parameters):
    """Return the fields of the form for a sweep of the job, with a row for each parameter."""
    values = {"job": job.pk, "metric": "accuracy", "goal": "maximize", "method": "random", "pruner": "none"}
    values |= {"trials": "3", "concurrency": "1", "ceiling": "", "name": "search"}
    rows = [ROW | parameter for parameter in parameters]
    columns = {f"parameter_{name}": [row[name] for row in rows] for name in ("name", *ROW)}
    return values | columns


LR = {"name": "LR", "low": "0.001", "high": "0.1", "scale": "log"}
HIDDEN = {"name": "--hidden", "type": "categorical", "choices": "32, 64, wide"}


@pytest.fixture
def page(owner_page, completed_job):
    """`page(url_name, *arguments, **data)` posts a form. `page.quote` posts the form of a sweep of `completed_job`."""

    class Page:
        job = completed_job

        def __call__(self, url_name, /, *arguments, **data):
            return owner_page.post(reverse(url_name, args=arguments), data, headers=HTMX)

        def quote(self, *parameters, **changes):
            return self("sweep_quote", **form(completed_job, *parameters) | changes).content.decode()

    return Page()


def test_a_sweep_is_bought_once_from_a_job_and_its_page_shows_the_best_trial(page, owner_page, sweeper):
    new = owner_page.get(reverse("sweep_new"), {"job": page.job.pk}).content.decode()
    assert 'value="LR"' in new
    assert f"{page.job.nodes} × {page.job.node_spec.title}" in new
    card = page.quote(LR, HIDDEN, {"name": "", "low": "7"})  # a row without a name is ignored
    assert 'data-minimum="5"' in card
    order = {name: re.search(rf'name="{name}" value="([^"]+)"', card)[1] for name in ("quote", "idempotency_key")}
    addresses = {page("sweep_order", **order)["HX-Redirect"] for _twice in range(2)}
    sweep = Sweep.objects.get()
    assert addresses == {reverse("sweep_detail", args=[sweep.pk])}
    assert (sweep.name, sweep.quote.purchase["sweep"]["space"]) == (
        "search",
        [
            ["LR", {"type": "float", "low": 0.001, "high": 0.1, "log": True}],
            ["--hidden", {"type": "categorical", "choices": [32, 64, "wide"]}],
        ],
    )
    progress.advance(sweep_pk=sweep.pk)  # orders the first trial
    live = owner_page.get(addresses.pop(), headers=HTMX).content.decode()
    assert "every 3s" in live  # the page refreshes itself until the sweep has ended
    sweeper.finish(sweep)  # the value grows with a trial's number, so the third, number 2, is the best
    shown = owner_page.get(reverse("sweep_detail", args=[sweep.pk])).content.decode()
    assert "every 3s" not in shown
    assert "All trials have ended." in shown
    best = sweep.trials.get(number=2)
    assert reverse("job_publish", args=[best.job_id]) in shown
    assert best.job.name == "search trial 2"  # the number that the page of the sweep shows
    chart = json.loads(re.search(r'id="sweep-data"[^>]*>(.*?)</script>', shown)[1])
    assert owner_page.get(chart["trials"]).json()["results"][2]["is_best"]
    trial_page = owner_page.get(reverse("job_detail", args=[sweep.trials.first().job_id])).content.decode()
    assert reverse("sweep_detail", args=[sweep.pk]) in trial_page


def test_trials_are_sorted_and_filtered(owner_page, sweeper):
    sweep = sweeper.buy(trials=3, concurrency=3)
    for trial, value in zip(sweep.trials.all(), (0.2, 0.9), strict=False):
        sweeper.run(trial, value)
    sweeper.run(sweep.trials.last(), 0.1, outcome=Outcome.CODE_FAILED)
    progress.advance(sweep_pk=sweep.pk)  # stores the outcomes of the trials

    def numbers(**query):
        page = owner_page.get(reverse("sweep_detail", args=[sweep.pk]), query, headers=HTMX).content.decode()
        return [int(number) for number in re.findall(r'text-nowrap" href="/jobs/\d+/">(\d+) ', page)]

    assert numbers() == [0, 1, 2]
    assert numbers(sort="newest") == [2, 1, 0]
    assert numbers(sort="best") == [1, 0, 2]
    assert numbers(outcome="failed") == [2]
    assert numbers(outcome="open") == []


def test_an_error_is_shown_beside_its_field(page):
    for field, parameters, changes in (
        ("space", [], {}),
        ("space", [LR, LR], {}),
        ("space", [LR | {"low": "low"}], {}),
        ("space", [LR | {"low": "1e999"}], {}),
        ("space", [LR | {"when": "{"}], {}),
        ("space", [LR | {"when": "[" * 100_000}], {}),  # nested too deeply to be read
        ("method", [LR], {"method": "grid"}),
        ("objective", [LR], {"metric": ""}),
        ("trials", [LR], {"trials": "many"}),
        ("trials", [LR], {"trials": ""}),
        ("ceiling_minor", [LR], {"ceiling": "1.2.3"}),
        ("ceiling_minor", [LR], {"ceiling": "0.01"}),
    ):
        card = page.quote(*parameters, **changes)
        wrong = re.findall(r'id="error-(\w+)" role="alert" hx-swap-oob="true">[^<]', card)
        assert (wrong, 'id="buy"' in card) == ([field], False), (field, str(parameters)[:99], changes)


def test_an_ended_sweep_gets_more_trials_and_is_cloned(page, owner_page, sweeper):
    condition = {"parameter": "--hidden", "in": [64]}
    space = {
        "--hidden": {"type": "categorical", "choices": [32, 64]},
        "DEPTH": {"type": "int", "low": 0, "high": 4, "when": condition},
    }
    sweep = sweeper.buy(space=space, trials=2)
    assert "is open" in page("sweep_extend", sweep.pk, trials="2", ceiling="").content.decode()
    sweeper.finish(sweep)
    card = page("sweep_extend", sweep.pk, trials="2", ceiling="").content.decode()
    page("sweep_order", quote=re.search(r'name="quote" value="([^"]+)"', card)[1], idempotency_key="more")
    more = Sweep.objects.get(extends=sweep)
    shown = owner_page.get(reverse("sweep_detail", args=[more.pk])).content.decode()
    assert f'href="{reverse("sweep_detail", args=[sweep.pk])}"' in shown
    clone = owner_page.get(reverse("sweep_new"), {"sweep": sweep.pk}).content.decode()
    assert "Only if --hidden is 64." in clone
    rows = [
        {"name": "--hidden", "type": "categorical", "choices": "32, 64"},
        {"name": "DEPTH", "type": "int", "low": "0", "high": "4", "when": json.dumps(condition)},
    ]
    assert 'id="buy"' in page.quote(*rows, sweep=sweep.pk, job="")


def test_a_clone_searches_the_same_space(page, owner_page, sweeper):
    space = {
        "--hidden": {"type": "categorical", "choices": [32, 0.001, "64,64", "007", "1.10", 'say "hi"']},
        "LR": {"type": "float", "low": 0.123456789, "high": 12345678.5, "log": True},
        "TOKENS": {"type": "int", "low": 1_000_000, "high": 20_000_019, "step": 1_000_001},
    }
    sweep = sweeper.buy(space=space, trials=2)
    clone = form_of(owner_page.get(reverse("sweep_new"), {"sweep": sweep.pk}).text)
    assert 'id="buy"' in page("sweep_quote", **clone).text
    assert dict(Quote.objects.latest("created_at").purchase["sweep"]["space"]) == space
    endless = HIDDEN | {"choices": "x" * 200_000}  # longer than a cell of CSV may be
    assert "The choices of a parameter are invalid." in page.quote(endless)


def test_a_sweep_is_stopped_and_another_organization_cannot_start_from_it(
    page, stranger, browser, sweeper, completed_job
):
    client, sweep = browser(stranger), sweeper.buy()
    for _twice in range(2):
        assert page("sweep_stop", sweep.pk).url == reverse("sweep_detail", args=[sweep.pk])
    sweep.refresh_from_db()
    assert (sweep.state, sweep.reason) == ("stopping", "stopped")
    for origin in ({"job": completed_job.pk}, {"sweep": sweep.pk}):
        answer = client.post(reverse("sweep_quote"), form(completed_job, LR) | {"job": ""} | origin)
        assert answer.status_code == 404
