"""From the API server's objects to facts, and facts through annotations and back."""

import dataclasses
import json
from typing import Any

from runtime.backends.kubernetes_facts import PodFact, latest, read_job, read_pod
from runtime.backends.kubernetes_names import INDEX, SPEC, SUBMITTED
from tests.runtime.backends.samples import JOB, over, pod


def _job(**parts: Any) -> dict[str, Any]:
    meta = {
        "name": "job-1-1",
        "namespace": "runs",
        "uid": "u",
        "annotations": {SPEC: '{"workers": 2}', SUBMITTED: "5.5"},
    }
    return {"metadata": meta, "spec": {"completions": 2, "suspend": False}, "status": {}, **parts}


def test_a_job_is_read_as_it_is() -> None:
    conditions = [
        {"type": "Suspended", "status": "False"},
        {
            "type": "FailureTarget",
            "status": "True",
            "reason": "BackoffLimitExceeded",
            "lastTransitionTime": "1970-01-01T00:01:00Z",
        },
    ]
    fact = read_job(_job(status={"startTime": "1970-01-01T00:00:10Z", "conditions": conditions}))
    assert (fact.failing, fact.ended_as, fact.begun_at, fact.failed_at) == (True, "", 10.0, 60.0)
    assert (fact.told["workers"], fact.submitted_at) == (2, 5.5)


def _pod(status: dict[str, Any], **meta: Any) -> dict[str, Any]:
    told = {"name": "p", "uid": "p", "annotations": {INDEX: "1"}, "creationTimestamp": "1970-01-01T00:00:10Z"}
    return {"metadata": {**told, **meta}, "spec": {"nodeName": "m"}, "status": status}


def test_a_container_that_could_not_start_never_started() -> None:
    ended = {
        "reason": "StartError",
        "exitCode": 128,
        "startedAt": "1970-01-01T00:00:00Z",
        "finishedAt": "1970-01-01T00:01:00Z",
    }
    fact = read_pod(_pod({"phase": "Failed", "containerStatuses": [{"name": "node", "state": {"terminated": ended}}]}))
    assert fact is not None
    assert (fact.started_at, fact.finished_at, fact.ended) == (None, 60.0, True)


def test_a_pod_that_is_no_node_of_a_run_is_none() -> None:
    assert read_pod(_pod({}, annotations={})) is None


def test_the_newest_pod_of_a_node_counts_and_a_pod_that_is_gone_as_it_was_kept() -> None:
    kept = PodFact(1, uid="old", created_at=5.0, disruption="PreemptionByScheduler")
    job = dataclasses.replace(JOB, kept={0: PodFact(0, uid="z", created_at=1.0, exit_code=4), 1: kept})
    found = latest(job, [pod(1), dataclasses.replace(pod(1), uid="younger", created_at=995.0)])
    assert found[1].uid == "younger"
    assert (found[0].exit_code, found[0].ended) == (4, True)


def test_facts_survive_their_way_through_an_annotation() -> None:
    told = over(1, 0, message='{"a":"ü"}', disrupted_at=7.0)
    assert PodFact.from_json(told.to_json()) == told
    assert json.loads(told.to_json())["exit_code"] == 0
