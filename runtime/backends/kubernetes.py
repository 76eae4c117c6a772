"""The Kubernetes backend: a run is an Indexed Job, and what belongs to it.

It hides the API server and everything that can go wrong with it. Its one rule: the API server is the truth. Any number
of these objects, in any number of processes, may work on one cluster and die at any moment; what has to outlive a pod
is written on the run's Job.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runtime.backends.base import Check
from runtime.backends.kubernetes_config import ClusterConfig


class KubernetesBackend:
    """Runs on one cluster. `root` is where this console sees the runs' folders, inside the config's volume."""

    def __init__(self, *, config: ClusterConfig, root: Path) -> None:
        self._config = config
        self._root = root


def check(config: ClusterConfig, root: Path, *, smoke: bool = True) -> Iterator[Check]:
    """Look at a cluster, line by line, as far as it can be reached; `smoke` starts a run of one node at the end.

    Never raises for what is wrong with the cluster: that is a line, with its remedy.
    """
    raise NotImplementedError
