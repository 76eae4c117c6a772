"""Submit a run: create its objects in an order that allows any step to be repeated.

First come the objects that several runs share (the organization's namespace, the launcher), and the run's folders. Then
the Job is created, suspended. It owns all objects that are created after it. The last step marks it as submitted and
resumes it. If the submitter dies in between, the Job that is left does not count as a run. The next submission
continues with it.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

from runtime.backends import admission
from runtime.backends.kubernetes import manifests
from runtime.backends.kubernetes.client import ApiClient, ApiError, Object, collection_path, resource_path
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.launcher_archive import LauncherConfigMaps
from runtime.backends.kubernetes.names import SUBMITTED_ANNOTATION, namespace_of
from runtime.backends.kubernetes.objects import Manifest, is_deleting, is_owned_by
from runtime.backends.kubernetes.pod import image_of, sub_path
from runtime.backends.kubernetes.pod_plan import build_pod_inputs
from runtime.backends.kubernetes.runs import Runs
from runtime.backends.kubernetes.state import is_existing_run, is_submitted
from runtime.backends.kubernetes.volume import RunFolders
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RuntimeFault
from runtime.specs import PACKAGES_TARGET, Mount, RunSpec

_SECRET_ATTEMPTS = 3
"""How often to try to create the run's Secret. A try fails only if another process creates or deletes a Secret of this
name at that moment, so a third try is rarely needed."""
_FIELDS_BY_WORD = {"image": "image", "subPath": "mounts", "mountPath": "mounts", "resources": "resources"}
"""Which field of the RunSpec made an object invalid, by a word in the API server's message; the first match counts."""


class Submission:
    """Submits runs to one cluster. `root` is the folder of its runs, as the console sees it."""

    def __init__(
        self,
        api: ApiClient,
        config: ClusterConfig,
        runs: Runs,
        root: Path,
        folders: RunFolders | None,
        *,
        launchers: LauncherConfigMaps,
    ) -> None:
        """`folders` is None if the console does not share the cluster's storage."""
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
        job = self._runs.find_job(spec.name)
        if job is not None and is_existing_run(job):
            return
        spec = self._validate(spec)
        try:
            self._create_objects(spec, job)
        except ApiError as error:
            self._delete_incomplete(spec)
            raise self._translate(error) from error

    def _validate(self, spec: RunSpec) -> RunSpec:
        """Return the spec with the sources of its mounts resolved. Raises InvalidSpec."""
        image_of(spec, self._config)  # raises InvalidSpec for a built-in image that the cluster lacks
        if spec.packages and self._folders is None:
            raise InvalidSpec("This cluster cannot add packages to an image.", field="packages")
        admission.check_values(spec)
        if self._folders is not None:
            spec = admission.resolve_mounts(spec)
        packages = [Mount(spec.packages, PACKAGES_TARGET)] if spec.packages else []
        for mount in (*spec.mounts, *packages):
            sub_path(mount, self._config)  # raises InvalidSpec for a folder outside the volume
        return spec

    def _create_objects(self, spec: RunSpec, job: Object | None) -> None:
        """Create the run's objects. `job` is the Job that an interrupted submission has left; None if there is none."""
        inputs = build_pod_inputs(spec, self._config, self._root)
        namespace = namespace_of(spec, self._config)
        if job is not None and is_deleting(job):
            raise BackendUnavailable(f"An earlier run named '{spec.name}' is still being deleted.")
        if job is None:  # else the interrupted submission has done this before it created the Job
            if namespace != self._config.namespace:
                for manifest in manifests.organization_objects(spec, self._config):
                    self._api.apply(manifest)
            if self._folders is not None:
                self._folders.create(spec.name, spec.checkpoint_key)
            job = self._api.create(manifests.job(spec, self._config, inputs, self._launchers.ensure(namespace)))
        if job is None:
            # `create` found a Job of this name: another process submits the same run at this moment.
            job = self._api.get(resource_path("batch/v1", "jobs", namespace, spec.name))
        keys = {"token": secrets.token_hex(32), "record_key": secrets.token_hex(32)}
        for manifest in manifests.owned_objects(spec, self._config, inputs, job["metadata"]["uid"], keys):
            if manifest["kind"] == "Secret" and manifest["metadata"]["name"] == spec.name:  # it has `keys`
                self._create_secret(manifest)
            else:
                self._api.apply(manifest)
        self._mark_submitted(job)

    def _create_secret(self, manifest: Manifest) -> None:
        """Create the run's Secret.

        An existing Secret of this Job is kept, since Pods may use its keys already. A Secret of an earlier Job is
        replaced.
        """
        job_uid = manifest["metadata"]["ownerReferences"][0]["uid"]
        path = f"{collection_path(manifest)}/{manifest['metadata']['name']}"
        for _attempt in range(_SECRET_ATTEMPTS):
            if self._api.create(manifest) is not None:
                return
            existing = self._api.find(path)
            if existing is None:
                continue
            if is_owned_by(existing, job_uid):
                return
            self._api.delete(path, uid=existing["metadata"]["uid"])
        raise BackendUnavailable(
            "The run's Secret could not be created: another process keeps creating one of its name."
        )

    def _mark_submitted(self, job: Object) -> None:
        """Store when the submission was complete, which makes the run exist, and resume its Job.

        With a Kueue queue the Job stays suspended: Kueue resumes it when it admits the run.
        """
        meta = job["metadata"]
        change: dict[str, Any] = {
            "metadata": {"uid": meta["uid"], "annotations": {SUBMITTED_ANNOTATION: repr(time.time())}}
        }
        if not self._config.queue:
            change["spec"] = {"suspend": False}
        self._api.patch(resource_path("batch/v1", "jobs", meta["namespace"], meta["name"]), change)

    def _delete_incomplete(self, spec: RunSpec) -> None:
        """Delete the Job of a failed submission, and with it all objects that it owns.

        Does nothing if another process has completed the submission.
        """
        job = self._runs.find_job(spec.name)
        # Not `is_existing_run`, which is False for a submitted run that is being deleted.
        if job is not None and not is_submitted(job):
            self._runs.delete_job(job)

    def _translate(self, error: ApiError) -> RuntimeFault:
        """Return the error that `Backend.submit` raises for a refusal of the API server."""
        # 422 means an invalid object. 403 means a missing permission or a used-up quota.
        if error.status == 422:
            field = next((field for word, field in _FIELDS_BY_WORD.items() if word in error.message), "name")
            return InvalidSpec(f"The cluster refuses the run: {error.message}", field=field)
        if error.status == 403 and "exceeded quota" in error.message:
            return NoCapacity(f"The namespace's quota is used up: {error.message}")
        return BackendUnavailable(
            f"The cluster '{self._config.name}' refuses the run: {error}. 'manage.py check_cluster "
            f"{self._config.name}' says what is missing."
        )
