"""Which pods were told to go while all of their run were well: by the order in which a watch tells of pods.

A Job's controller tells pods to go after one has failed, and whoever deletes a pod makes its peers fail after that. The
API server has one order for all changes of pods, which no clock is part of. The one rule: only a pod that was seen well
in this very stretch of the order counts; what changed between two stretches, nobody knows the order of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Object = Mapping[str, Any]

_ENDED = frozenset({"Succeeded", "Failed"})


class Departures:
    """Told of each change of pods, in their order, and of each list that begins a new stretch."""

    def __init__(self) -> None:
        self._well: dict[str, str] = {}
        self._failed: set[str] = set()

    def begin(self, pods: Iterable[Object]) -> None:
        """A list: what was before it is forgotten, but for who had failed."""
        self._well.clear()
        for pod in pods:
            if _ended_badly(pod):
                self._failed.add(_owner(pod))
            elif not _is_ended(pod) and not pod["metadata"].get("deletionTimestamp"):
                self._well[pod["metadata"]["uid"]] = _owner(pod)

    def take(self, change: str, pod: Object) -> bool:
        """One change. Gives whether by it the pod was told to go, or went, before any of its run had failed."""
        meta, owner = pod["metadata"], _owner(pod)
        if _is_ended(pod):
            self._well.pop(meta["uid"], None)
            if _ended_badly(pod):
                self._failed.add(owner)
            return False
        if change == "DELETED" or meta.get("deletionTimestamp"):
            return self._well.pop(meta["uid"], None) is not None and owner not in self._failed
        self._well[meta["uid"]] = owner
        return False

    def forget(self, owner: str) -> None:
        """The Job of this uid has ended, or is gone."""
        self._failed.discard(owner)


def _owner(pod: Object) -> str:
    owners = pod["metadata"].get("ownerReferences") or []
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def _is_ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in _ENDED


def _ended_badly(pod: Object) -> bool:
    return bool((pod.get("status") or {}).get("phase") == "Failed")
