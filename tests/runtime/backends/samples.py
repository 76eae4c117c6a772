"""A Job of two nodes and its pods, as facts."""

import dataclasses
from typing import Any

from runtime.backends.kubernetes_facts import JobFact, PodFact

START, END = 1000.0, 1100.0

JOB = JobFact(
    name="job-1-1",
    namespace="runs",
    uid="u",
    nodes=2,
    told={"workers": 1, "builtin": True, "memory_mib": 256, "disk_mib": 512, "min_nodes": 0},
    suspended=False,
    begun_at=990.0,
    submitted_at=989.5,
    started_at=None,
    taken_down=None,
    final="",
    failing=False,
    ended_as="",
    ended_at=None,
    failed_at=None,
    end_reason="",
    end_message="",
    kept={},
)
FAILED = dataclasses.replace(
    JOB, failing=True, ended_as="Failed", ended_at=END + 1, failed_at=END + 1, end_reason="BackoffLimitExceeded"
)


def pod(node: int, **changes: Any) -> PodFact:
    fact = PodFact(
        node,
        name=f"p{node}",
        uid=f"p{node}",
        created_at=990.0,
        machine=f"m{node}",
        started_at=START - node,
        address="10.0.0.1",
    )
    return dataclasses.replace(fact, **changes)


def over(node: int, code: int = 0, **changes: Any) -> PodFact:
    reason = "Completed" if code == 0 else "Error"
    told = {"ended": True, "exit_code": code, "finished_at": END, "container_reason": reason}
    return pod(node, **{**told, **changes})
