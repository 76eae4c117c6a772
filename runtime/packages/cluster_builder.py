"""Install a layer's packages on a Kubernetes cluster, by a run of one node in the customer's image.

The run installs them into its folder on the cluster's volume, which later runs can mount. The cluster keeps the state
of the installation, so any process may start, read and finish it. Each step can be repeated.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from runtime.backends.base import Backend
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.volume import RunFolders
from runtime.errors import RunNotFound
from runtime.packages import builder, layers
from runtime.packages.builder import MAX_LOG_BYTES, InstallRequest, InstallResult
from runtime.packages.indexes import Indexes
from runtime.packages.layers import Layer
from runtime.specs import Image, Mount, Outcome, PullSecret, RunPhase

START_SECONDS = 1800
"""How long an installation may wait for a free machine and for its image. Then it counts as failed by a platform fault,
and is tried again."""


def can_install(config: ClusterConfig) -> bool:
    """Whether runs of this cluster can get packages: its settings name an index, and the console shares its storage."""
    return config.package_index is not None and config.volume.shared


def layer_key(config: ClusterConfig, image: Image, requirements: Sequence[str]) -> str:
    """Return the key of the layer with these requirements on an image of this cluster."""
    builtin_reference = config.images.get(image.builtin, image.builtin)
    return layers.cluster_layer_key(
        cluster_name=config.name,
        image_reference=(image.reference + image.digest) if image.reference else builtin_reference,
        python=config.pythons.get(image.builtin or image.reference, ""),
        requirements=requirements,
    )


def layers_root(runs_root: Path) -> Path:
    """Return the root of a cluster's layers. `runs_root` is the folder of its runs, inside its volume."""
    return runs_root / ".packages"


def start(
    layer: Layer,
    request: InstallRequest,
    *,
    backend: Backend,
    config: ClusterConfig,
    image: Image,
    pull_secret: PullSecret | None,
    organization_slug: str,
) -> None:
    """Start the installation, if `can_install`. Does nothing if the layer is complete.

    Raises InvalidSpec, NoCapacity, BackendUnavailable, OSError.
    """
    index = config.package_index
    if layer.is_complete or index is None:
        return
    for folder in (layer.root, layer.folder.parent, layer.folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o711)  # kubelets may enter these folders to mount those below; other users cannot list them
    # No hosts and no proxy: the pod connects to the index itself, as its network policy allows.
    allowed_indexes = Indexes(addresses=(index.url,), find_links=(), hosts={}, certificate=index.certificate)
    mounts = builder.prepare_inputs(layer, request.requirements, allowed_indexes, settings={})
    # Each run needs a workspace, even this one, which does not use it.
    workspace = Mount(str(layer.folder / "inputs"), "/workspace")
    spec = builder.install_spec(_run_name(layer), image, request, (workspace, *mounts))
    labels = {"organization": organization_slug}
    backend.submit(dataclasses.replace(spec, pull_secret=pull_secret, labels=labels))


def has_run(layer: Layer, backend: Backend) -> bool:
    """Whether the cluster has a run that installs this layer, even if it has ended. Raises BackendUnavailable."""
    try:
        backend.describe(_run_name(layer))
    except RunNotFound:
        return False
    return True


def collect_result(layer: Layer, backend: Backend) -> tuple[InstallResult, str] | None:
    """Return how the installation ended, and the end of its output; None if it has not ended or does not exist.

    This call also deletes the installation's run. If the caller dies before it stores the result, a later call finds
    the layer complete, or the installation starts again. Raises BackendUnavailable.
    """
    if layer.is_complete:
        log = log_of(layer)  # before its file is deleted with the run
        backend.delete(_run_name(layer))
        return InstallResult(size_bytes=layers.size_of(layer.packages)), log
    try:
        status = backend.describe(_run_name(layer))
    except RunNotFound:
        return None
    is_late = (
        status.phase is not RunPhase.ENDED
        and status.started_at is None
        and status.submitted_at is not None
        and time.time() > status.submitted_at + START_SECONDS
    )
    if status.phase is not RunPhase.ENDED and not is_late:
        return None
    log = log_of(layer)
    if is_late:
        result = InstallResult(f"The installation did not start. {status.waiting_for}".strip(), is_fault=True)
    elif status.outcome is Outcome.COMPLETED:
        try:
            size = layers.move_installed(layer, _runs_root(layer) / _run_name(layer))
        except OSError as error:
            result = InstallResult(f"The packages could not be moved to their place: {error}", is_fault=True)
        else:
            # None: a package has replaced the folder of packages.
            result = InstallResult(builder.REPLACED_FOLDER) if size is None else InstallResult(size_bytes=size)
    elif status.outcome is Outcome.CODE_FAILED:
        failure_message = status.failure.message if status.failure else ""
        result = InstallResult(builder.reason_of(log) if log else failure_message)
    else:
        result = builder.failed_result(status)
    backend.delete(_run_name(layer))
    return result, log


def log_of(layer: Layer) -> str:
    """Return the end of the installation's output so far. Reads the shared storage without asking the cluster."""
    folders = RunFolders(_runs_root(layer), uid=0)  # only new folders get this owner, and none is created here
    raw_chunk = folders.read(_run_name(layer), "logs", "rank-0.log", -MAX_LOG_BYTES, MAX_LOG_BYTES)
    return raw_chunk.data.decode("utf-8", "replace").replace("\0", "")


def _run_name(layer: Layer) -> str:
    """Return the name of the installation's run. It has the organization, since two organizations may have one key.

    It has only the beginning of the key, since a run's name has at most 52 characters (`specs.NAME_PATTERN`).
    """
    return f"packages-{layer.organization_id}-{layer.key[:12]}"


def _runs_root(layer: Layer) -> Path:
    """Return the folder of the cluster's runs, as `layers_root` takes it."""
    return layer.root.parent
