"""The identity of one pod of a run: values in its environment, which `pod.main` documents."""

from __future__ import annotations

import os
from typing import Dict, Mapping, NamedTuple

_DEFAULT_PLAN_PATH = "/trainyard/order/order.json"  # the launch plan; its variable and path keep an older name
_DEFAULT_TERMINATION_PATH = "/dev/termination-log"
_PRIVATE_PREFIXES = ("TRAINYARD_", "KUBERNETES_")
_SECRET_PREFIX = "TRAINYARD_SECRET_"  # noqa: S105 - the beginning of names
_HOME = "/tmp"  # noqa: S108 - the pod's own


class PodIdentity(NamedTuple):
    """The values that are specific to this pod, from its environment.

    `environment` has the variables that the ranks inherit. `secrets` are those of the job, by name; the ranks get
    them too.
    """

    node: int
    address: str
    token: str
    record_key: str
    plan_path: str
    termination_path: str
    environment: Dict[str, str]
    secrets: Dict[str, str]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> PodIdentity:
        """Read the environment of a pod. Raises KeyError, ValueError."""
        return cls(
            node=int(environment["TRAINYARD_NODE"]),
            address=environment["TRAINYARD_ADDRESS"],
            token=environment["TRAINYARD_TOKEN"],
            record_key=environment["TRAINYARD_RECORD_KEY"],
            plan_path=environment.get("TRAINYARD_ORDER", _DEFAULT_PLAN_PATH),
            termination_path=environment.get("TRAINYARD_TERMINATION", _DEFAULT_TERMINATION_PATH),
            environment=inherited_environment(environment),
            secrets={
                name[len(_SECRET_PREFIX) :]: value
                for name, value in environment.items()
                if name.startswith(_SECRET_PREFIX)
            },
        )


def inherited_environment(environment: Mapping[str, str]) -> Dict[str, str]:
    """Return the environment variables that the ranks get from this process."""
    inherited = {name: value for name, value in environment.items() if not name.startswith(_PRIVATE_PREFIXES)}
    inherited.update(HOME=_HOME, USER="trainyard", LOGNAME="trainyard")
    inherited.setdefault("LANG", "C.UTF-8")
    inherited.setdefault("PATH", os.defpath)
    return inherited
