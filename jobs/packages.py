"""Extra Python packages of runs: read a requirements file, install its packages once, release the jobs that wait.

An order with requirements refers to a PackageLayer. While the layer is not installed, its jobs wait in the queue. For
runs on Kubernetes, a run on the cluster installs the packages (`runtime.packages.cluster_builder`). For all others, a
separate process on the console's machine (below: this machine) does (`runtime.packages.builder`). Both survive a
restart of the console, so `advance` only starts them and reads their results. Each step can be repeated.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Sum
from django.utils import timezone
from django.utils.translation import gettext as _

from billing.models import NodeSpec
from console.accounts.models import Organization
from console.core.errors import CustomerError, InvalidInput
from jobs import lifecycle, locks
from jobs.clusters import cluster, image_of, resolve_cluster_name, runs_root
from jobs.errors import QuotaExceeded
from jobs.images import pull_secret
from jobs.models import Job, PackageLayer
from jobs.pubsub import publish_state
from jobs.states import ENDED, EndReason, JobState
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.errors import InvalidSpec, RuntimeFault
from runtime.packages import builder, cluster_builder, layers, requirements
from runtime.packages.builder import InstallRequest, InstallResult
from runtime.packages.layers import Layer
from runtime.packages.requirements import InvalidRequirements, Problem
from storage import files
from storage import selectors as storage
from storage.errors import InUse, NotText
from storage.models import Image, Workspace
from storage.paths import split_path

logger = logging.getLogger(__name__)

FILE_NAME = "requirements.txt"
"""The file beside a script that `unchosen_file` looks for."""
FIELD = "requirements"
"""The field of a purchase at which errors are reported."""
MAX_INSTALLATIONS = 2
"""Installations that run at once on this machine. Each may take two cores away from runs."""
MAX_FAULTS = 3
"""Platform faults after which an installation counts as failed: a fourth try rarely cures a repeated fault."""
INSTALLATION = "installing"
"""The kind of the event of a job whose order caused an installation."""
LAYER_RETENTION = timedelta(days=30)
"""How long a layer is kept after the last order that used it. A later order installs the packages again."""
States = PackageLayer.States


@dataclass(frozen=True)
class Requirements:
    """A requirements file: its path in the workspace, and its normalized requirements, one per line."""

    path: str
    lines: tuple[str, ...]


# --- Choosing ---------------------------------------------------------------------------------------------------------


def read_requirements(workspace: Workspace, path: str) -> Requirements:
    """Read a requirements file of a workspace. Raises InvalidInput at the field `requirements`."""
    root = storage.workspace_folder(workspace)
    try:
        text = files.read_text(root=root, path=path, limit_bytes=requirements.MAX_BYTES)
        return Requirements("/".join(split_path(path)), requirements.parse(text))
    except NotText:
        raise _invalid(_("This is not a text file of at most 64 KiB.")) from None
    except CustomerError as error:
        raise _invalid(str(error.message)) from None
    except InvalidRequirements as error:
        raise _invalid(_refusal(error)) from None


def requirements_of(job: Job) -> Requirements | None:
    """Return the requirements of a job as they were when it was ordered; None if it has none."""
    if job.packages is None:
        return None
    return Requirements(job.requirements_path, tuple(job.packages.requirements.splitlines()))


def check(file: Requirements, *, image: Image | None, spec: NodeSpec | None) -> None:
    """Check that the packages can be added to the image on the spec's cluster. Raises InvalidInput.

    `image` or `spec` is None if the customer's choice is invalid. Checks that need it are skipped.
    """
    config = _kubernetes_config(resolve_cluster_name(spec.cluster)) if spec is not None else None
    if config is not None and not cluster_builder.can_install(config):
        raise _invalid(
            _(
                "The cluster of this node spec reaches no package index, so it can't install packages. Use an image "
                "that contains them, choose another node spec, or ask the administrator to set up an index."
            )
        )
    if image is None or config is not None:  # only the cluster knows what its images contain
        return
    if not image.is_builtin:  # this machine installs packages, and does not have the image
        raise _invalid(
            _(
                "The cluster of this node spec can't install packages in addition to your own images. Use an image "
                "that contains them, or a built-in image."
            )
        )
    conflict = requirements.find_conflict(file.lines, layers.installed_versions(_image_folder(image)))
    if conflict is not None:
        sentence = _(
            "The image %(image)s contains %(name)s %(version)s, which can't be replaced. Remove or loosen "
            "“%(requirement)s”, or choose another image."
        )
        values = {"image": image.name, "name": conflict.name, "version": conflict.installed_version}
        raise _invalid(sentence % {**values, "requirement": conflict.requirement})


def unchosen_file(organization: Organization, purchase: Mapping[str, Any]) -> str:
    """Return the path of a requirements.txt beside the script that the customer did not choose.

    Return "" if no valid file is there, or if the purchase has requirements. `purchase` is stored with a quote.
    """
    if purchase.get("requirements") or purchase.get("exact"):
        return ""  # an exact rerun keeps the choice of its original
    path = posixpath.join(posixpath.dirname(str(purchase.get("code_path", ""))), FILE_NAME)
    try:
        workspace = storage.workspace_named(organization, str(purchase.get("workspace", "")))
        return read_requirements(workspace, path).path
    except CustomerError:
        return ""


def require_layer(
    *, organization: Organization, image: Image, digest: str, cluster_name: str, lines: Sequence[str]
) -> PackageLayer:
    """Return the layer with these requirements.

    A layer that is not installed becomes PENDING; `advance` then installs it. Raises QuotaExceeded if that would be one
    installation too many in 24 hours: installations are free, and anybody can change a requirements file.

    `digest` is the image's, "" if it is unknown. `lines` are the requirements. The caller has locked the
    organization's row of Quota, as each order does, so the organization's orders come here one at a time.
    """
    now = timezone.now()
    values = {"image": image, "requirements": "\n".join(lines), "requested_at": now, "used_at": now}
    config = _kubernetes_config(cluster_name)
    if config is None:
        folder = _image_folder(image)
        key = layers.layer_key(image=folder, versions=layers.installed_versions(folder), requirements=lines)
    else:
        values |= {"cluster": cluster_name, "image_digest": digest}
        key = cluster_builder.layer_key(config, image_of(image, digest), lines)
    layer, is_new = PackageLayer.objects.select_for_update().get_or_create(
        organization=organization, key=key, defaults=values
    )
    if is_new:
        _require_installation_left(organization)
        return layer
    layer.used_at = now
    # A failed installation is repeated, because the index may have the package now. A layer is also installed again if
    # it was removed, or if it is READY and its folder is gone, for example because the storage was replaced.
    if layer.state != States.PENDING and not (layer.state == States.READY and _layer_folder(layer).is_complete):
        _require_installation_left(organization)
        layer.state, layer.reason, layer.log, layer.faults, layer.requested_at = States.PENDING, "", "", 0, now
        builder.remove_result(_layer_folder(layer))
    layer.save()
    return layer


def record_installation(job: Job) -> None:
    """Write an event about the installation of a new job's packages, if its order has caused one."""
    layer = job.packages
    if layer is not None and layer.requested_at == layer.used_at:  # `require_layer` has just set both
        lifecycle.record_event(job=job, kind=INSTALLATION, data={"path": job.requirements_path})


def _require_installation_left(organization: Organization) -> None:
    """Raise QuotaExceeded if the orders of the last 24 hours caused as many installations as the settings allow.

    They may allow none.
    """
    limit = settings.PACKAGE_INSTALLATIONS_PER_DAY
    if not limit:
        raise QuotaExceeded(
            _(
                "The administrator does not allow the installation of packages. Use a requirements file whose packages "
                "are already installed, or an image that has them."
            )
        )
    recent = Job.objects.filter(organization=organization, queued_at__gt=timezone.now() - timedelta(days=1))
    # An installation that failed by a platform fault does not count: its jobs ended with PLATFORM_ERROR before they
    # started. In a customer's own image it counts, because code there can report a fault that did not happen.
    recent = recent.exclude(reason=EndReason.PLATFORM_ERROR, started_at=None, image__organization=None)
    if recent.filter(events__kind=INSTALLATION).count() >= limit:
        sentence = _(
            "Packages were installed for your organization %(most)d times in the last 24 hours, which is the limit. "
            "Use a requirements file whose packages are already installed, or try again later."
        )
        raise QuotaExceeded(sentence % {"most": limit})


def folder_of(job: Job) -> str:
    """Return the path of the folder with a job's packages; "" if it has none."""
    return str(_layer_folder(job.packages).packages) if job.packages else ""


def log_of(layer: PackageLayer) -> str:
    """Return the end of the installation's output so far."""
    if layer.state != States.PENDING:
        return layer.log
    return cluster_builder.log_of(_layer_folder(layer)) if layer.cluster else builder.log_of(_layer_folder(layer))


# --- Installing -------------------------------------------------------------------------------------------------------


def advance() -> set[str]:
    """Start installations, store the results of ended ones, and release the jobs that waited for them.

    Return the names of the clusters on which jobs can start now. Does nothing while another process calls it.
    """
    with locks.packages_lock() as has_lock:
        if not has_lock:
            return set()
        waiting = []
        pending = PackageLayer.objects.filter(state=States.PENDING).select_related("image", "organization")
        for layer in pending.order_by("requested_at"):
            if (result_and_log := _read_result(layer)) is not None:
                _save_result(layer, *result_and_log)
            else:
                waiting.append(layer)
        # An organization has one installation at a time on each cluster, and one on this machine (the cluster "").
        busy = {(layer.cluster, layer.organization_id) for layer in waiting if _is_working(layer)}
        # Organizations take turns, so that one with many installations does not keep the others waiting. The sort is
        # stable, so each organization's own installations keep their order.
        waiting.sort(key=_last_started_at)
        awaited = set(Job.objects.filter(awaits_packages=True).values_list("packages", flat=True))
        for layer in waiting:
            slot = (layer.cluster, layer.organization_id)
            if layer.pk not in awaited:
                # The layer's jobs were cancelled. If it were installed, customers could have packages built for jobs
                # that they never run.
                if slot not in busy:  # otherwise the layer may be the one that is being installed
                    _remove([layer.pk])
                continue
            installations_here = sum(cluster_name == "" for cluster_name, _pk in busy)
            is_full = not layer.cluster and installations_here >= MAX_INSTALLATIONS
            if slot not in busy and not is_full and _make_room(layer):
                _start(layer)
                busy.add(slot)
        return _release_jobs()


def _last_started_at(layer: PackageLayer) -> float:
    """Return when the last installation of the layer's organization was started on this machine; 0 if none was.

    On a cluster, each organization can have an installation at the same time, so organizations need not take turns.
    """
    return 0.0 if layer.cluster else builder.last_started_at(_layer_folder(layer))


def remove_unused() -> None:
    """Remove the layers that no order has used for LAYER_RETENTION. Their rows stay, for the pages of their jobs.

    Does nothing while another process holds the lock; the next call removes them.
    """
    with locks.packages_lock() as has_lock:
        if has_lock:
            old = PackageLayer.objects.filter(
                used_at__lt=timezone.now() - LAYER_RETENTION, state__in=[States.READY, States.FAILED]
            )
            _remove(old.values_list("pk", flat=True))


def remove_all(organization: Organization) -> None:
    """Remove the layers of an organization without open jobs, with their logs and the cache. Safe to repeat.

    The rows stay, because jobs refer to them. Raises InUse while an installation runs, or another process holds the
    lock.
    """
    all_layers = PackageLayer.objects.filter(organization=organization)
    roots = {_layer_folder(layer).root for layer in all_layers}
    if not roots:
        return
    with locks.packages_lock() as has_lock:
        if not has_lock:
            raise InUse(_("Packages are being handled. The console tries again in a few minutes."))
        if any(layer.state == States.PENDING and _is_working(layer) for layer in all_layers):
            raise InUse(_("Packages are being installed. Wait for the installation to end."))
        all_layers.update(state=States.REMOVED, size_bytes=0, requirements="", reason="", log="")
        for root in roots:
            layers.move_to_trash(root, str(organization.pk))
    for root in roots:  # without the lock, since this may take long
        layers.empty_trash(root)


def _start(layer: PackageLayer) -> None:
    """Start an installation on this machine or on the layer's cluster. If it can never start, save the failure.

    Reasons are stored in English, like the installer's own, because no customer's language applies here.
    """
    request = InstallRequest(
        image=layer.image.name,
        images_root=str(settings.TRAINYARD_IMAGES_ROOT),
        requirements=tuple(layer.requirements.splitlines()),
        indexes=tuple(settings.PACKAGE_INDEXES),
        file_hosts=tuple(settings.PACKAGE_FILE_HOSTS),
        network=settings.TRAINYARD_RUN_NETWORK,
        # The default, but no more than all packages of the organization may take.
        disk_mib=min(InstallRequest.disk_mib, settings.PACKAGES_MAX_MIB),
    )
    if not layer.cluster:
        try:
            builder.start(_layer_folder(layer), request)
        except OSError as error:  # such as a full disk; the next call tries again
            logger.warning("The installer of the packages %s cannot be started now: %s", layer.key, error)
        return
    config = _kubernetes_config(layer.cluster)
    if config is None or not cluster_builder.can_install(config):  # the settings have changed
        _save_result(layer, InstallResult(f"The cluster {layer.cluster} no longer installs packages."), log="")
        return
    try:
        cluster_builder.start(
            _layer_folder(layer),
            request,
            backend=cluster(layer.cluster),
            config=config,
            image=image_of(layer.image, layer.image_digest),
            pull_secret=pull_secret(organization=layer.organization, image=layer.image),
            organization_slug=layer.organization.slug,
        )
    except (InvalidSpec, OSError) as error:  # a platform fault, which counts for MAX_FAULTS
        _save_result(layer, InstallResult(str(error), is_fault=True), log="")
    except (RuntimeFault, CustomerError) as error:  # retried at the next call, when the cluster may answer or have room
        logger.warning("The packages %s can't be installed on %s now: %s", layer.key, layer.cluster, error)


def _read_result(layer: PackageLayer) -> tuple[InstallResult, str] | None:
    """Return how the installation ended, and the end of its output.

    None if it has not ended, or its cluster does not answer.
    """
    folder = _layer_folder(layer)
    if not layer.cluster:
        result = builder.result_of(folder)
        return None if result is None else (result, builder.log_of(folder))
    try:
        return cluster_builder.collect_result(folder, cluster(layer.cluster))
    except RuntimeFault:
        return None


def _is_working(layer: PackageLayer) -> bool:
    """Return whether this layer must wait for a running installation.

    On this machine that is any installation of the organization, because they share a lock; on a cluster only the
    layer's own. Also True for a cluster that does not answer, because an installation may run there.
    """
    if not layer.cluster:
        return builder.is_working(_layer_folder(layer))
    try:
        return cluster_builder.has_run(_layer_folder(layer), cluster(layer.cluster))
    except RuntimeFault:
        # False if the settings no longer name the cluster, so that `_start` is called and saves the failure.
        return layer.cluster in settings.TRAINYARD_CLUSTERS


def _save_result(layer: PackageLayer, result: InstallResult, log: str) -> None:
    """Store how an installation ended. After a platform fault it is repeated, until there were MAX_FAULTS of them."""
    layer.log = log
    if result.is_fault:
        logger.error("The packages %s of %s could not be installed: %s", layer.key, layer.organization, result.reason)
        layer.faults += 1
        if layer.faults < MAX_FAULTS:
            builder.remove_result(_layer_folder(layer))  # so that the next call of `advance` starts it again
        else:
            layer.state = States.FAILED
    else:
        layer.state = States.FAILED if result.reason else States.READY
        layer.reason = result.reason
        layer.size_bytes = result.size_bytes
    PackageLayer.objects.filter(pk=layer.pk, state=States.PENDING).update(
        state=layer.state, reason=layer.reason, log=layer.log, faults=layer.faults, size_bytes=layer.size_bytes
    )
    if layer.state == States.FAILED:
        _layer_folder(layer).remove()


def _release_jobs() -> set[str]:
    """Let jobs start whose packages are installed, and return their clusters. End jobs whose packages failed."""
    released = set()
    waiting = Job.objects.filter(awaits_packages=True, state=JobState.QUEUED)
    for job in waiting.exclude(packages__state=States.PENDING).select_related("packages", "node_spec"):
        layer = job.packages
        if layer is not None and layer.state == States.READY:
            Job.objects.filter(pk=job.pk).update(awaits_packages=False)
            publish_state(job.pk)
            released.add(resolve_cluster_name(job.node_spec.cluster))
        else:
            _end_job(job, layer.reason if layer else "")
    return released


def _end_job(job: Job, reason: str) -> None:
    """End a job whose packages could not be installed. An empty `reason` means a fault of the platform."""
    try:
        lifecycle.end_queued(
            job_pk=job.pk,
            reason=EndReason.PACKAGES_FAILED if reason else EndReason.PLATFORM_ERROR,
            detail=reason,
        )
    except Exception:  # one job must not keep the others waiting
        logger.exception("Job %s could not be ended; the next call tries again.", job.pk)


def _make_room(layer: PackageLayer) -> bool:
    """Make room for another layer of the organization. Return False if that is impossible; the layer then fails.

    Layers that no open job needs are removed, the least recently used ones first. The reason is English: see `_start`.
    """
    limit = settings.PACKAGES_MAX_MIB << 20
    ready = PackageLayer.objects.filter(organization=layer.organization, state=States.READY)
    open_jobs = Job.objects.filter(packages=OuterRef("pk")).exclude(state__in=ENDED)
    unused = ready.exclude(Exists(open_jobs)).order_by("used_at").values_list("pk", flat=True)
    while (used := ready.aggregate(total=Sum("size_bytes"))["total"] or 0) >= limit:
        oldest = unused.first()
        if oldest is None or not _remove([oldest]):
            reason = (
                f"The packages of your open jobs take {used >> 20} MiB, the limit is {settings.PACKAGES_MAX_MIB} MiB."
            )
            PackageLayer.objects.filter(pk=layer.pk).update(state=States.FAILED, reason=reason)
            return False
    return True


def _remove(layer_pks: Iterable[int]) -> bool:
    """Remove these layers, except those that an open job needs. Return whether any was removed.

    The caller holds `packages_lock`, so no installation fills a folder while it is removed here. Without the lock one
    could, because an order may request the layer again once it is REMOVED.
    """
    has_removed = False
    for layer_pk in layer_pks:
        with transaction.atomic():
            # Orders lock the layer before they write their job, so no order can start to use it after this check.
            layer = PackageLayer.objects.select_for_update(of=("self",)).get(pk=layer_pk)
            if Job.objects.filter(packages=layer).exclude(state__in=ENDED).exists():
                continue
            PackageLayer.objects.filter(pk=layer_pk).update(state=States.REMOVED, size_bytes=0)
        # Removed only after the commit: a rollback would leave the layer READY, but could not bring its folder back.
        _layer_folder(layer).remove()
        has_removed = True
    return has_removed


def _layer_folder(layer: PackageLayer) -> Layer:
    """Return the folder of a layer, on this machine or on the shared storage of its cluster."""
    root = settings.TRAINYARD_PACKAGES_ROOT
    if layer.cluster:
        root = cluster_builder.layers_root(runs_root(layer.cluster))
    return Layer(root, str(layer.organization_id), layer.key)


def _kubernetes_config(name: str) -> ClusterConfig | None:
    """Return the configuration of a Kubernetes cluster; None for Slurm and local clusters and for unknown names.

    For runs on Slurm and local clusters, this machine installs the packages.
    """
    config = settings.TRAINYARD_CLUSTERS.get(name)
    return config if isinstance(config, ClusterConfig) else None


def _image_folder(image: Image) -> Path:
    """Return the folder of a built-in image on this machine."""
    root: Path = settings.TRAINYARD_IMAGES_ROOT
    return root / image.name


def _invalid(sentence: str) -> InvalidInput:
    return InvalidInput(fields={FIELD: sentence})


def _refusal(error: InvalidRequirements) -> str:
    """Return the sentence for a refused requirements file."""
    sentences = {
        Problem.TOO_LARGE: _("This is not a text file of at most 64 KiB."),
        Problem.TOO_MANY: _("The file lists more than %(most)d packages."),
        Problem.EMPTY: _("The file lists no packages."),
        Problem.OPTION: _("Line %(line)d: “%(text)s” contains an option. List only packages, such as einops>=0.8."),
        Problem.PLACE: _(
            "Line %(line)d: “%(text)s” is an address or a path. List only packages of the package index, such as "
            "einops>=0.8."
        ),
        Problem.SYNTAX: _("Line %(line)d: “%(text)s” is not a requirement such as einops>=0.8."),
    }
    values = {"line": error.line, "text": error.text, "most": requirements.MAX_REQUIREMENTS}
    return sentences[error.problem] % values
