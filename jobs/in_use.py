"""Find the open jobs that use objects of `storage`.

`storage` may not import `jobs`, so `jobs` registers `open_jobs_using` with `storage.in_use` as a callback. `apps.py`
imports this module before Django has loaded the models, so it imports no model.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from django.apps import apps
from django.db.models import Q
from django.utils import formats, timezone
from django.utils.translation import gettext as _

from jobs.states import ENDED
from storage.in_use import ObjectIds

if TYPE_CHECKING:
    from jobs.models import Job

MAX_NAMED = 5
"""Jobs that an error message names: enough to find them, and still one sentence."""


def open_jobs_using(objects: ObjectIds, *, viewer_organization_id: int | None) -> list[str]:
    """Return the name and latest end of up to MAX_NAMED open jobs that use any of these objects.

    Names of other organizations' jobs, which use shared datasets, are hidden (`storage.in_use`).
    """
    job_datasets = apps.get_model("jobs", "JobDataset").objects.filter(version__in=objects.dataset_versions)
    job_models = apps.get_model("jobs", "JobModel").objects.filter(version__in=objects.model_versions)
    uses = Q(workspace__in=objects.workspaces) | Q(image__in=objects.images)
    uses |= Q(pk__in=job_datasets.values("job")) | Q(pk__in=job_models.values("job"))
    for secret in apps.get_model("storage", "Secret").objects.filter(pk__in=objects.secrets):
        uses |= Q(organization=secret.organization_id, secrets__contains=[secret.name])
    jobs = apps.get_model("jobs", "Job").objects.exclude(state__in=ENDED).filter(uses).order_by("pk")
    rows = jobs.select_related("order__quote", "order__product").prefetch_related("attempts")[:MAX_NAMED]
    return [_description(job, is_own=job.organization_id == viewer_organization_id) for job in rows]


def _description(job: Job, *, is_own: bool) -> str:
    """Return a job's name and latest end for an error message. `is_own`: the reader may see its name."""
    name = f"#{job.pk} {job.name}" if is_own else _("A run of another organization")
    ends_at = _latest_end(job)
    if ends_at is None:
        minutes = -(-job.deadline_seconds // 60)  # rounded up
        return _("%(name)s (not started; runs for at most %(minutes)d min)") % {"name": name, "minutes": minutes}
    time = formats.date_format(timezone.localtime(ends_at), "DATETIME_FORMAT")
    return _("%(name)s (until %(time)s at the latest)") % {"name": name, "time": time}


def _latest_end(job: Job) -> datetime | None:
    """Return when the running attempt must have ended; None if there is none."""
    attempt = next((each for each in job.attempts.all() if each.started_at and not each.finished_at), None)
    if attempt is None or attempt.started_at is None:
        return None
    seconds = job.deadline_seconds
    # `deadline_seconds` is for all ordered nodes. On fewer nodes the same ceiling pays for a longer time, up to the
    # customer's own time limit or else the product's: see `usage.left_seconds`.
    if attempt.granted_nodes < job.nodes:
        seconds = max(seconds, job.order.quote.purchase.get("max_seconds") or job.order.product.max_seconds)
    return attempt.started_at + timedelta(seconds=seconds)
