"""How a run comes to be on a cluster: a few objects, in an order in which any step may be the last for a while.

The one rule: the Job comes first and suspended, owns everything else, and counts as submitted only when all of that is
there. Whoever submits again goes on from wherever the last one stopped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.backends import admission, manifests
from runtime.backends.kubernetes_api import Api, Object, Refused, home_of, path_of
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_folder import Folders
from runtime.backends.kubernetes_launchers import Launchers
from runtime.backends.kubernetes_names import SUBMITTED, namespace_of_run
from runtime.backends.kubernetes_order import order as make_order
from runtime.backends.kubernetes_pod import image_of, sub_path
from runtime.backends.kubernetes_runs import Runs, is_submitted
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RuntimeFault
from runtime.specs import RunSpec

_BEGIN_TRIES = 3


class Submission:
    """Makes runs on one cluster."""

    def __init__(
        self,
        api: Api,
        config: ClusterConfig,
        runs: Runs,
        root: Path,
        folders: Folders | None,
        *,
        launchers: Launchers,
    ) -> None:
        self._api = api
        self._config = config
        self._runs = runs
        self._root = root
        self._folders = folders
        self._launchers = launchers

    def submit(self, spec: RunSpec) -> None:
        """See `Backend.submit`."""
        admission.check_name(spec.name)
        if not spec.name[0].isalpha():
            raise InvalidSpec(f"'{spec.name}' cannot name a run on Kubernetes: begin with a letter.", field="name")
        found = self._runs.find(spec.name)
        if found is not None and is_submitted(found) and not found["metadata"].get("deletionTimestamp"):
            return
        spec = self._checked(spec)
        try:
            self._make(spec, found)
        except Refused as refused:
            raise self._undo(spec, refused) from refused

    def _checked(self, spec: RunSpec) -> RunSpec:
        image_of(spec, self._config)
        spec = admission.check_shape(spec)
        if self._folders is not None:
            spec = admission.check_folders(spec)
        for mount in spec.mounts:
            sub_path(mount, self._config)
        return spec

    def _make(self, spec: RunSpec, found: Object | None) -> None:
        order = make_order(spec, self._config, self._root)
        namespace = namespace_of_run(spec, self._config)
        if found is not None and found["metadata"].get("deletionTimestamp"):
            raise BackendUnavailable(f"The run '{spec.name}' of before is still being deleted.")
        if found is None:
            if namespace != self._config.namespace:
                for one in manifests.organization_objects(spec, self._config):
                    self._api.apply(one)
            if self._folders is not None:
                self._folders.make(spec.name, spec.checkpoint_key)
        launcher = self._launchers.ready(namespace)
        job = found or self._api.create(manifests.job(spec, self._config, order, launcher))
        if job is None:
            # Somebody submits the same run beside us.
            job = self._api.get(path_of("batch/v1", "jobs", namespace, spec.name))
        keys = {"token": secrets.token_hex(32), "record_key": secrets.token_hex(32)}
        for one in manifests.owned(spec, self._config, order, job["metadata"]["uid"], keys):
            self._own(one)
        self._begin(job)

    def _own(self, manifest: Object) -> None:
        """Make what belongs to the Job. Keys that pods may hold already stay; what an older Job has left does not."""
        if "token" not in manifest.get("data", {}):
            self._api.apply(manifest)
            return
        uid = manifest["metadata"]["ownerReferences"][0]["uid"]
        path = f"{home_of(manifest)}/{manifest['metadata']['name']}"
        for _try in range(_BEGIN_TRIES):
            if self._api.create(manifest) is not None:
                return
            found = self._api.find(path)
            if found is None:
                continue
            if any(owner["uid"] == uid for owner in found["metadata"].get("ownerReferences") or []):
                return
            self._api.delete(path, uid=found["metadata"]["uid"])
        raise BackendUnavailable("The run's keys could not be made: others of its name are in the way.")

    def _begin(self, job: Object) -> None:
        """All is there: the run exists from here on. Where a queue admits runs, that is what starts it."""
        meta = job["metadata"]
        change: dict[str, Any] = {
            "metadata": {"uid": meta["uid"], "annotations": {SUBMITTED: repr(time.time())}},
        }
        if not self._config.queue:
            change["spec"] = {"suspend": False}
        self._api.patch(path_of("batch/v1", "jobs", meta["namespace"], meta["name"]), change)

    def _undo(self, spec: RunSpec, refused: Refused) -> RuntimeFault:
        """What a refusal means; nothing of the run is left, unless another submits it at the same time."""
        found = self._runs.find(spec.name)
        if found is not None and not is_submitted(found):
            meta = found["metadata"]
            self._api.delete(path_of("batch/v1", "jobs", meta["namespace"], meta["name"]), uid=meta["uid"])
        if refused.status == 422:
            return InvalidSpec(f"The cluster refuses the run: {refused.message}", field=_field(refused.message))
        if refused.status == 403 and "exceeded quota" in refused.message:
            return NoCapacity(f"The namespace's quota is used up: {refused.message}")
        return BackendUnavailable(
            f"The cluster '{self._config.name}' refuses the run: {refused}. 'manage.py check_cluster "
            f"{self._config.name}' says what is missing."
        )


def _field(message: str) -> str:
    known: Mapping[str, str] = {"image": "image", "subPath": "mounts", "mountPath": "mounts", "resources": "resources"}
    return next((field for word, field in known.items() if word in message), "name")
