"""Publish outputs or checkpoints of a job as a model, with its lineage: which job, script and data produced it."""

from __future__ import annotations

from typing import Any

from django.db.models import Max, Min
from django.utils.translation import gettext_lazy as _

from console.accounts.models import User
from console.core.errors import InvalidInput
from jobs import job_files, run_specs, selectors
from jobs.models import Job, MetricPoint
from storage import model_catalog
from storage.errors import FileMissing, UnsafePath, WrongKind
from storage.model_catalog import Lineage, MetricSummary
from storage.models import ModelVersion
from storage.paths import split_path

MAX_METRICS = 100
"""Curves that a lineage contains at most, so that its size is limited."""


def publish_model(*, job: Job, user: User | None, name: str, path: str, description: str = "") -> ModelVersion:
    """Publish a file or folder of the job as the next version of the model `name`.

    `path` is as in `job_files`, below `outputs` or `checkpoints`. Raises InvalidInput, TooLarge, StorageFull,
    SourceChanged, ClusterUnavailable.
    """
    try:
        top, *below = split_path(path.strip("/")) or ("",)
        if top not in job_files.RESULTS:
            raise InvalidInput(fields={"path": _("Choose a path that begins with outputs or checkpoints.")})
        path = "/".join((top, *below))
        location = job_files.resolve(job, path)
        return model_catalog.publish_version(
            organization=job.organization,
            user=user,
            name=name,
            root=location.root,
            path=location.path,
            lineage=lineage(job, path),
            description=description,
        )
    except FileMissing:
        raise InvalidInput(fields={"path": _("This job has no file or folder at this path.")}) from None
    except (UnsafePath, WrongKind) as error:
        raise InvalidInput(fields={"path": error.message}) from None


def lineage(job: Job, path: str) -> Lineage:
    """Return how the files at `path` were made. `job` comes from `selectors.job_for`."""
    receipt = selectors.receipt(job)
    return {
        "job": job.pk,
        "job_name": job.name,
        "path": path,
        "framework": job.framework,
        "image": job.image.name,
        "workspace": job.workspace.name,
        "code_path": job.code_path,
        "arguments": list(job.arguments),
        "script_sha256": job.script.sha256 if job.script else "",
        "epochs": job.epochs,
        "lr": job.lr,
        "batch_size": job.batch_size,
        "datasets": [
            {"name": version.dataset.name, "version": version.number}
            for version in run_specs.mounted_dataset_versions(job)
        ],
        "models": [
            {"name": version.model.name, "version": version.number} for version in run_specs.mounted_model_versions(job)
        ],
        "from_checkpoint": job.from_checkpoint_id,
        "metrics": metric_summaries(job),
        "price_minor": receipt.total_minor if receipt else None,
        "currency": job.order.quote.currency,
    }


def metric_summaries(job: Job) -> dict[str, MetricSummary]:
    """Return the last, lowest and highest value of each of the job's curves, by name."""
    points = MetricPoint.objects.filter(job=job)
    ranges: dict[str, Any] = {
        row["name"]: row
        for row in points.order_by("name")
        .values("name")
        .annotate(lowest=Min("value"), highest=Max("value"))[:MAX_METRICS]
    }
    # The last value is that of the highest `position`, not of the highest step: a script may count anew in each epoch.
    newest = points.filter(name__in=ranges).order_by("name", "-position", "-pk").distinct("name")
    return {
        name: {"last": last, "lowest": ranges[name]["lowest"], "highest": ranges[name]["highest"]}
        for name, last in newest.values_list("name", "value")
    }
