"""The details of a job that customers can change: its name, tags, notes, and how long its files are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _
from rest_framework import serializers
from rest_framework.serializers import ValidationError

from console.accounts.models import User
from console.accounts.services import record_audit_event
from console.core.errors import InvalidInput
from jobs import results
from jobs.errors import QuotaExceeded
from jobs.fields import FormField, FormSerializer, is_storable_text
from jobs.models import Job
from storage import selectors as storage
from storage.models import Allocation

MAX_NAME_LENGTH = 100
"""Characters of a job's name: the length of its column."""
MAX_TAGS = 20
"""Tags of one job: more do not fit in a row of the list."""
MAX_NOTES_LENGTH = 5000
"""Characters of a job's notes: about two pages."""
TAG_PATTERN = re.compile(r"^[a-z0-9]([a-z0-9_-]{0,38}[a-z0-9])?\Z")
"""A tag has 1 to 40 of the characters that names of datasets and workspaces may have."""


class JobNameField(FormField, serializers.CharField):
    """A job's name on one line; empty: the script's file name."""

    def to_internal_value(self, data: Any) -> str:
        """Return the name with single spaces. Raises ValidationError."""
        name = " ".join(data.split()) if isinstance(data, str) else None
        if name is None or len(name) > MAX_NAME_LENGTH or not name.isprintable() or not is_storable_text(name):
            raise ValidationError(
                _("The name must have at most %(most)d printable characters.") % {"most": MAX_NAME_LENGTH}
            )
        return name


class TagsField(FormField, serializers.ListField):
    """Tags: a list (API), or separated by commas or spaces (forms)."""

    child = serializers.CharField()

    def to_internal_value(self, data: Any) -> list[str]:
        """Return the tags in order, each once. Raises ValidationError."""
        tags = re.split(r"[,\s]+", data.strip(", \t\r\n")) if isinstance(data, str) else data
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise ValidationError(_("The tags must be a list of strings."))
        # In a form's text, an empty tag only means that there is a separator too many. In a list it is an error.
        tags = list(dict.fromkeys(tag for tag in tags if tag or not isinstance(data, str)))
        if len(tags) > MAX_TAGS:
            raise ValidationError(_("Use at most %(most)d tags.") % {"most": MAX_TAGS})
        if not all(TAG_PATTERN.match(tag) for tag in tags):
            raise ValidationError(
                _(
                    "A tag has 1 to 40 lowercase letters, digits, hyphens and underscores. It starts and ends with "
                    "a letter or digit."
                )
            )
        return tags


class NotesField(FormField, serializers.CharField):
    """Notes on a job, of several lines."""

    def to_internal_value(self, data: Any) -> str:
        """Return the notes with Unix line ends. Raises ValidationError."""
        notes = data.replace("\r\n", "\n").strip() if isinstance(data, str) else None
        if notes is None or len(notes) > MAX_NOTES_LENGTH or not is_storable_text(notes):
            raise ValidationError(_("The notes must have at most %(most)d characters.") % {"most": MAX_NOTES_LENGTH})
        return notes


class KeepUntilField(FormField, serializers.DateTimeField):
    """A time in the future, within `settings.MAX_KEEP_DAYS`; null: `results.DEFAULT_RETENTION` after the job's end."""

    def to_internal_value(self, data: Any) -> datetime:
        """Return the time. Raises ValidationError."""
        time = serializers.DateTimeField().to_internal_value(data)
        now = timezone.now()
        if not now < time <= now + timedelta(days=settings.MAX_KEEP_DAYS):
            sentence = _("Choose a time in the future, at most %(days)d days from now.")
            raise ValidationError(sentence % {"days": settings.MAX_KEEP_DAYS})
        return time


class DetailsSerializer(FormSerializer):
    """The details of a job. Fields that are left out keep their values."""

    name = JobNameField(
        default="", help_text="At most 100 characters; empty: the name of the script, or of a notebook's workspace."
    )
    tags = TagsField(default=list, help_text="At most 20, each with 1 to 40 lowercase letters, digits, `-` and `_`.")
    notes = NotesField(default="", help_text="At most 5,000 characters.")
    keep_until = KeepUntilField(
        default=None, help_text="Until when logs, outputs and checkpoints are kept; null: 30 days after the job ends."
    )


def update_details(*, job: Job, user: User | None, data: Mapping[str, Any]) -> Job:
    """Change the details that `data` names (the API's field names), and return the job.

    Raises InvalidInput, and QuotaExceeded if the files are to be kept longer though the storage quota is used up.
    """
    if not isinstance(data, Mapping):
        raise InvalidInput(_("Send a JSON object."))
    values = DetailsSerializer(data=data).values()
    changes = {name: value for name, value in values.items() if name in data}
    if "name" in changes:
        # A notebook has no script.
        changes["name"] = changes["name"] or default_name(job.code_path) or job.workspace.name
    with transaction.atomic():
        current = Job.objects.select_for_update().get(pk=job.pk)
        changes = {name: value for name, value in changes.items() if value != getattr(current, name)}
        if not changes:
            return current
        if "keep_until" in changes:
            _change_retention(current, changes["keep_until"])
        for name, value in changes.items():
            setattr(current, name, value)
        current.save(update_fields=[*changes, "deletion_notice"])  # `_change_retention` may have cleared the notice
        record_audit_event(
            organization=job.organization,
            actor=user,
            action="job.changed",
            target=f"job:{job.pk}",
            data={"fields": sorted(changes)},
        )
    return current


def default_name(code_path: str) -> str:
    """Return the name of a job if the customer has not chosen one: the script's file name."""
    return code_path.rsplit("/", 1)[-1][:MAX_NAME_LENGTH]


def _change_retention(job: Job, keep_until: datetime | None) -> None:
    """Change until when the job's files are kept. The caller has locked the job and saves it."""
    old_time = results.deletion_time(job)
    if old_time is not None and old_time <= timezone.now():
        sentence = _("The files of this job have already been deleted.")
        raise InvalidInput(fields={"keep_until": sentence})
    job.keep_until = keep_until
    new_time = results.deletion_time(job)
    # The deletion time of a job that has not ended is unknown. Any time that the customer sets then counts as longer.
    is_longer = keep_until is not None
    if old_time is not None and new_time is not None:
        is_longer = new_time > old_time
    if is_longer and not storage.quota_left(job.organization):
        sentence = _("Your storage quota is used up, so these files can't be kept longer. Delete other files first.")
        raise QuotaExceeded(sentence, fields={"keep_until": sentence})
    job.deletion_notice = None  # so that members are warned again, before the new time
    # The row by which the storage quota counts the job's files.
    Allocation.objects.filter(key=results.allocation_key(job.pk)).update(kept_until=new_time)
