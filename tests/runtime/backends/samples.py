"""The state of a Job of two nodes and of its Pods. All times are Unix seconds."""

import dataclasses

from runtime.backends.kubernetes.state import JobState, PodState, SpecSummary

START, END = 1000.0, 1100.0
"""When the last Pod started, and when Pods exited unless a test says otherwise."""

JOB = JobState(
    name="job-1-1",
    namespace="runs",
    uid="u",
    nodes=2,
    spec=SpecSummary(builtin=True, memory_mib=256, disk_mib=512),
    suspended=False,
    start_time=990.0,  # when the Job controller began to create Pods
    submitted_at=989.5,
    started_at=None,  # the console has not stored START yet
    termination=None,
    final_status=None,
    is_failing=False,
    end_condition="",
    ended_at=None,
    failed_at=None,
    failure_reason="",
    failure_message="",
    saved_pods={},
)
FAILED = dataclasses.replace(
    JOB,
    is_failing=True,
    end_condition="Failed",
    ended_at=END + 1,
    failed_at=END + 1,
    failure_reason="BackoffLimitExceeded",
)


def running(node, **changes):
    """Return the Pod of a node that runs. Node 0 starts last, at START."""
    state = PodState(
        node,
        name=f"p{node}",
        uid=f"p{node}",
        created_at=990.0,
        machine=f"m{node}",
        started_at=START - node,
        address="10.0.0.1",
    )
    return dataclasses.replace(state, **changes)


def ended(node, code=0, **changes):
    """Return the Pod of a node that exited with this code at END."""
    reason = "Completed" if code == 0 else "Error"
    fields = {"ended": True, "exit_code": code, "finished_at": END, "container_reason": reason}
    return running(node, **{**fields, **changes})
