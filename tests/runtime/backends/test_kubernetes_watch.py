"""Following a cluster by watches: pauses between them, and which runs may write output."""

import random
from types import SimpleNamespace

import pytest

from runtime.backends.kubernetes import names
from runtime.backends.kubernetes.client import ApiError, ResourceVersionExpired
from runtime.backends.kubernetes.watch import LISTED, RunningRuns, Watcher

NAME = "job-1-1"
SPEC = '{"workers": 4}'


def api_object(uid, phase="Running"):
    """A Job or Pod of the run."""
    meta = {"uid": uid, "labels": {names.RUN_LABEL: NAME}, "annotations": {names.SPEC_ANNOTATION: SPEC}}
    return {"metadata": meta, "spec": {"completions": 2}, "status": {"phase": phase}}


def test_a_run_may_write_output_while_its_job_is_live_and_one_of_its_pods_runs():
    runs, job, pods = RunningRuns(), api_object("job"), [api_object("a"), api_object("b")]

    def start():
        runs.observe("jobs", "MODIFIED", job)
        assert runs.sizes() == {}, "no Pod runs yet"
        for pod in pods:
            runs.observe("pods", "MODIFIED", pod)
        assert runs.sizes() == {NAME: (2, 8)}

    start()
    runs.observe("pods", "MODIFIED", api_object("a", "Succeeded"))
    assert list(runs.sizes()) == [NAME], "the other Pod still runs"
    # The Job leaves the watch at the run's end. Pods that are deleted later were still running.
    runs.observe("jobs", "DELETED", job)
    runs.observe("pods", "DELETED", pods[1])
    assert runs.sizes() == {}
    # The Job or the Pods have vanished while the watch was interrupted.
    for vanished, kept in (("jobs", "pods"), ("pods", "jobs")):
        start()
        runs.observe(kept, LISTED, {"items": [job, *pods]})
        assert list(runs.sizes()) == [NAME]
        runs.observe(vanished, LISTED, {"items": []})
        assert runs.sizes() == {}
        runs.observe(kept, LISTED, {"items": []})


@pytest.mark.parametrize("error", [None, ResourceVersionExpired(), ApiError(403, "Forbidden", "cannot watch")])
def test_the_pause_grows_while_watches_end_at_once(monkeypatch, caplog, error):
    pauses, watches = [], iter(range(3))

    def watch(*_arguments, **_query):
        next(watches)  # the fourth call fails the test
        if error is not None:
            raise error
        yield from ()

    monkeypatch.setattr(random, "uniform", lambda *_bounds: 1.0)
    api = SimpleNamespace(
        list=lambda *_path, **_query: {"items": [], "metadata": {"resourceVersion": "1"}}, watch=watch
    )
    watcher = Watcher(api, {}, lambda *_change: None)
    watcher._closed = SimpleNamespace(is_set=lambda: len(pauses) == 3, wait=pauses.append)
    watcher._follow("jobs", "/jobs")
    assert pauses == [0.2, 0.4, 0.8]
    # A refusal is logged once, not at each attempt.
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == (
        ["/jobs cannot be watched"] if isinstance(error, ApiError) else []
    )
