"""Administrators' work on storage: the image catalogue; datasets and workspaces are there to be read.

The one rule: nothing here shows a customer's secret or changes a customer's files.
"""

from __future__ import annotations

from django.contrib import admin
from django.urls import reverse
from unfold.admin import ModelAdmin

from console.accounts.readonly import ReadOnlyAdmin
from storage.models import Dataset, DatasetVersion, Image, Registry, Workspace


@admin.register(Image)
class ImageAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """The images on offer."""

    list_display = ("name", "title", "organization", "frameworks", "reference", "is_active")
    list_filter = ("is_active",)
    list_select_related = ("organization",)
    search_fields = ("name", "title", "reference")
    raw_id_fields = ("organization",)

    def view_on_site(self, _image: Image) -> str:
        """The console's images, where one click checks an image on the cluster."""
        return reverse("image_list")


@admin.register(Dataset)
class DatasetAdmin(ReadOnlyAdmin):
    """Datasets of all organizations."""

    list_display = ("name", "organization", "latest", "created_by", "created_at", "deleted_at")
    list_select_related = ("organization", "latest__dataset", "created_by")
    search_fields = ("name", "organization__name")


@admin.register(DatasetVersion)
class DatasetVersionAdmin(ReadOnlyAdmin):
    """Published versions of all organizations."""

    list_display = ("dataset", "number", "size_bytes", "file_count", "sha256", "published_at")
    list_select_related = ("dataset",)
    search_fields = ("dataset__name", "sha256")


@admin.register(Workspace)
class WorkspaceAdmin(ReadOnlyAdmin):
    """Workspaces of all organizations."""

    list_display = ("name", "organization", "size_bytes", "created_by", "created_at", "deleted_at")
    list_select_related = ("organization", "created_by")
    search_fields = ("name", "organization__name")


@admin.register(Registry)
class RegistryAdmin(ReadOnlyAdmin):
    """Whose images can be pulled from where; never with what password."""

    list_display = ("host", "organization", "username", "created_at")
    list_select_related = ("organization",)
    exclude = ("secret",)
