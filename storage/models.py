"""Images, datasets with their versions, workspaces: the rows that name things, whose bytes lie under `catalog.root()`.

The one rule: only `catalog` writes these rows, since each write goes together with a change on the disk.
"""

from __future__ import annotations

import re

from django.conf import settings
from django.core.validators import RegexValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from console.accounts.models import Organization

NAME_PATTERN = re.compile(r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?\Z")
NAME_VALIDATOR = RegexValidator(
    NAME_PATTERN,
    _("Use 1 to 63 lower-case letters, digits, dashes and underscores, beginning and ending with a letter or digit."),
)


class Registry(models.Model):
    """An image registry and the credentials to pull from it. The password is stored encrypted (`catalog`)."""

    organization = models.ForeignKey(Organization, models.CASCADE, related_name="registries")
    host = models.CharField(_("host"), max_length=255)
    username = models.CharField(_("user name"), max_length=255, blank=True)
    secret = models.BinaryField(blank=True, default=b"")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = _("registry")
        verbose_name_plural = _("registries")
        constraints = (models.UniqueConstraint(fields=["organization", "host"], name="one_registry_per_host"),)

    def __str__(self) -> str:
        return self.host


class Image(models.Model):
    """What a run's code runs in. Built-in images have no organization; a customer's own have a registry reference."""

    organization = models.ForeignKey(Organization, models.CASCADE, null=True, blank=True, related_name="images")
    name = models.CharField(_("name"), max_length=63, validators=[NAME_VALIDATOR])
    title = models.CharField(_("title"), max_length=100)
    description = models.TextField(_("description"), blank=True)
    frameworks = models.JSONField(_("frameworks"), default=list, help_text=_("pytorch, horovod, tensorflow"))
    reference = models.CharField(_("registry reference"), max_length=500, blank=True)
    is_active = models.BooleanField(_("offered"), default=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = _("image")
        verbose_name_plural = _("images")
        ordering = ("organization_id", "name")
        constraints = (
            models.UniqueConstraint(fields=["organization", "name"], name="one_image_per_name", nulls_distinct=False),
        )

    def __str__(self) -> str:
        return self.name

    @property
    def is_builtin(self) -> bool:
        """Whether the installation made it."""
        return self.organization_id is None


class Dataset(models.Model):
    """A named set of files; its published versions never change."""

    organization = models.ForeignKey(Organization, models.CASCADE, related_name="datasets")
    name = models.CharField(_("name"), max_length=63, validators=[NAME_VALIDATOR])
    description = models.TextField(_("description"), blank=True)
    latest = models.ForeignKey(
        "DatasetVersion", models.SET_NULL, null=True, blank=True, related_name="+", verbose_name=_("latest version")
    )
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    deleted_at = models.DateTimeField(_("deleted"), null=True, blank=True)

    class Meta:
        verbose_name = _("dataset")
        verbose_name_plural = _("datasets")
        ordering = ("name",)
        constraints = (
            models.UniqueConstraint(
                fields=["organization", "name"],
                name="one_dataset_per_name",
                condition=models.Q(deleted_at__isnull=True),
            ),
        )

    def __str__(self) -> str:
        return self.name


class DatasetVersion(models.Model):
    """One immutable state of a dataset: unpacked in a folder of its own, then published by one rename."""

    dataset = models.ForeignKey(Dataset, models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField(_("version"))
    folder = models.CharField(max_length=200, unique=True)
    size_bytes = models.PositiveBigIntegerField(_("size"))
    file_count = models.PositiveIntegerField(_("files"))
    sha256 = models.CharField(
        _("SHA-256"),
        max_length=64,
        help_text=_("Of the archive as sent; of files sent one by one, that of their list as sha256sum writes it."),
    )
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    published_at = models.DateTimeField(_("published"), auto_now_add=True)

    class Meta:
        verbose_name = _("dataset version")
        verbose_name_plural = _("dataset versions")
        ordering = ("-number",)
        constraints = (models.UniqueConstraint(fields=["dataset", "number"], name="one_dataset_version_per_number"),)

    def __str__(self) -> str:
        return f"{self.dataset} v{self.number}"


class Workspace(models.Model):
    """A folder of the customer's, writable from runs and from the console."""

    organization = models.ForeignKey(Organization, models.CASCADE, related_name="workspaces")
    name = models.CharField(_("name"), max_length=63, validators=[NAME_VALIDATOR])
    description = models.TextField(_("description"), blank=True)
    folder = models.CharField(max_length=200, unique=True)
    size_bytes = models.PositiveBigIntegerField(_("size"), default=0, help_text=_("as last measured"))
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(_("created"), auto_now_add=True)
    deleted_at = models.DateTimeField(_("deleted"), null=True, blank=True)

    class Meta:
        verbose_name = _("workspace")
        verbose_name_plural = _("workspaces")
        ordering = ("name",)
        constraints = (
            models.UniqueConstraint(
                fields=["organization", "name"],
                name="one_workspace_per_name",
                condition=models.Q(deleted_at__isnull=True),
            ),
        )

    def __str__(self) -> str:
        return self.name
