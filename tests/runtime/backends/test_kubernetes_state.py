"""Reading Jobs and Pods, and storing Pods in annotations."""

import dataclasses

from runtime.backends.kubernetes.names import INDEX_ANNOTATION
from runtime.backends.kubernetes.state import PodState, newest_pods, read_pod
from tests.runtime.backends.samples import JOB, running


def _pod(status, **meta):
    base = {
        "name": "p",
        "uid": "p",
        "annotations": {INDEX_ANNOTATION: "1"},
        "creationTimestamp": "1970-01-01T00:00:10Z",
    }
    return {"metadata": {**base, **meta}, "spec": {"nodeName": "m"}, "status": status}


def test_read_pod_ignores_the_start_time_of_a_container_that_failed_to_start():
    terminated = {
        "reason": "StartError",
        "exitCode": 128,
        "startedAt": "1970-01-01T00:00:00Z",
        "finishedAt": "1970-01-01T00:01:00Z",
    }
    state = read_pod(
        _pod({"phase": "Failed", "containerStatuses": [{"name": "node", "state": {"terminated": terminated}}]})
    )
    assert (state.started_at, state.finished_at, state.ended) == (None, 60.0, True)


def test_newest_pods_prefers_the_newest_pod_and_falls_back_to_the_saved_one():
    kept = PodState(1, uid="old", created_at=5.0, disruption="PreemptionByScheduler")
    job = dataclasses.replace(JOB, saved_pods={0: PodState(0, uid="z", created_at=1.0, exit_code=4), 1: kept})
    newest = newest_pods(job, [running(1), dataclasses.replace(running(1), uid="younger", created_at=995.0)])
    assert newest[1].uid == "younger"
    # A saved Pod that the API server no longer lists has ended.
    assert (newest[0].exit_code, newest[0].ended) == (4, True)
