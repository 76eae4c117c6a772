"""The launcher on a cluster: a ConfigMap for each version of it and each namespace, for all runs of that version.

The one rule: one that somebody may still start a run with stays. Every console that uses one says so on it again and
again, so that during an upgrade, or beside an older console, no version takes another's away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from runtime.backends import manifests, zipapp
from runtime.backends.kubernetes_api import Api, Object, Refused, path_of
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_facts import seconds
from runtime.backends.kubernetes_names import COMPONENT_LABEL, ENDED_LABEL, LAUNCHER, MANAGED_BY, MANAGER, USED

logger = logging.getLogger(__name__)

SAY_AGAIN_SECONDS = 3600.0
"""A process that starts runs says so often, at its next submission, that it uses its launcher."""
UNUSED_SECONDS = 24 * 3600.0
"""One that nobody has used for so long, and no run has mounted, is removed; but not before ours is as old, so that an
upgrade in between, with consoles that do not say what they use, is over."""


class Launchers:
    """The launchers of one cluster."""

    def __init__(self, api: Api, config: ClusterConfig) -> None:
        self._api = api
        self._config = config
        self._said: dict[str, float] = {}

    def ready(self, namespace: str) -> str:
        """The name of our launcher's ConfigMap, which is there. Raises Refused, BackendUnavailable."""
        manifest = _manifest(namespace)
        meta = manifest["metadata"]
        if time.monotonic() > self._said.get(namespace, -SAY_AGAIN_SECONDS) + SAY_AGAIN_SECONDS:
            said = time.monotonic()
            self._api.apply({**manifest, "metadata": {**meta, "annotations": {USED: repr(time.time())}}})
            self._said[namespace] = said
        return str(meta["name"])

    def collect(self, jobs: Iterable[Object]) -> None:
        """Remove those of versions that are no longer used; `jobs` are all of the runs. Raises BackendUnavailable."""
        mounted = {
            (job["metadata"]["namespace"], (volume.get("configMap") or {}).get("name"))
            for job in jobs
            if ENDED_LABEL not in (job["metadata"].get("labels") or {})
            for volume in job["spec"]["template"]["spec"].get("volumes") or []
        }
        namespace = "" if self._config.namespace_per_organization else self._config.namespace
        selector = f"{MANAGED_BY}={MANAGER},{COMPONENT_LABEL}={LAUNCHER}"
        try:
            found = self._api.list(path_of("v1", "configmaps", namespace), labelSelector=selector)["items"]
            ours = [one for one in found if one["metadata"]["name"] == _manifest("")["metadata"]["name"]]
            settled = {one["metadata"]["namespace"] for one in ours if _is_old(_made_at(one))}
            for one in found:
                meta = one["metadata"]
                is_used = (meta["namespace"], meta["name"]) in mounted or not _is_old(_used_at(one))
                if meta["namespace"] in settled and one not in ours and not is_used:
                    # By its version: whoever says now that it is used keeps it.
                    address = path_of("v1", "configmaps", meta["namespace"], meta["name"])
                    self._api.delete(address, version=meta["resourceVersion"])
        except Refused as refused:
            # Roles of before an upgrade: `check_cluster` says so too.
            logger.warning("Launchers of old versions stay in the cluster %s: %s", self._config.name, refused)


def _manifest(namespace: str) -> Object:
    return manifests.launcher(namespace, zipapp.build().data)


def _made_at(launcher: Object) -> float:
    return seconds(launcher["metadata"]["creationTimestamp"]) or 0.0


def _used_at(launcher: Object) -> float:
    """When somebody last said that it is used, or made it. What cannot be read is of now."""
    said = (launcher["metadata"].get("annotations") or {}).get(USED, "0")
    try:
        return max(float(said), _made_at(launcher))
    except ValueError:
        return time.time()


def _is_old(at: float) -> bool:
    return time.time() > at + UNUSED_SECONDS
