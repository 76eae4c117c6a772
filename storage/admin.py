"""Admin pages of storage. Images can be edited; datasets, models and workspaces are read-only.

No page shows a customer's secret or changes a customer's files.
"""

from __future__ import annotations

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin

from console.accounts.models import User
from console.core.readonly import ReadOnlyAdmin
from storage import sharing
from storage.models import (
    Allocation,
    Dataset,
    DatasetVersion,
    DeletedFile,
    Image,
    Model,
    ModelVersion,
    Registry,
    Workspace,
    WorkspaceImport,
)


@admin.register(Image)
class ImageAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Built-in images, and those of organizations."""

    list_display = ("name", "title", "organization", "frameworks", "reference", "is_active")
    list_filter = ("is_active",)
    list_select_related = ("organization",)
    search_fields = ("name", "title", "reference")
    raw_id_fields = ("organization",)

    def view_on_site(self, _image: Image) -> str:
        """Return the URL of the console's page of images, where an image can be checked on a cluster."""
        return reverse("image_list")


@admin.register(Dataset)
class DatasetAdmin(ReadOnlyAdmin):
    """Datasets of all organizations."""

    list_display = ("name", "organization", "is_public", "latest", "created_by", "created_at", "deleted_at")
    list_filter = ("is_public",)
    list_select_related = ("organization", "latest__dataset", "created_by")
    search_fields = ("name", "organization__name")
    actions = ("make_public", "withdraw")

    def has_publish_permission(self, request: HttpRequest) -> bool:
        """Return whether the administrator may use the two actions. The forms are read-only for everybody."""
        return bool(request.user.has_perm("storage.change_dataset"))

    @admin.action(description=_("Let every organization read the selected datasets"), permissions=["publish"])
    def make_public(self, request: HttpRequest, datasets: QuerySet[Dataset]) -> None:
        """Make datasets public."""
        self._set_public(request, datasets, is_public=True)

    @admin.action(description=_("Withdraw the selected datasets from other organizations"), permissions=["publish"])
    def withdraw(self, request: HttpRequest, datasets: QuerySet[Dataset]) -> None:
        """Withdraw public datasets."""
        self._set_public(request, datasets, is_public=False)

    def _set_public(self, request: HttpRequest, datasets: QuerySet[Dataset], *, is_public: bool) -> None:
        actor = request.user if isinstance(request.user, User) else None
        for dataset in datasets.select_related("organization"):
            sharing.set_public(dataset=dataset, is_public=is_public, actor=actor)


@admin.register(DatasetVersion)
class DatasetVersionAdmin(ReadOnlyAdmin):
    """Published versions of all organizations."""

    list_display = ("dataset", "number", "size_bytes", "file_count", "sha256", "published_at")
    list_select_related = ("dataset",)
    search_fields = ("dataset__name", "sha256")


@admin.register(Model)
class ModelCatalogueAdmin(ReadOnlyAdmin):
    """Models of all organizations. Named so because `ModelAdmin` is the base class of admin pages."""

    list_display = ("name", "organization", "latest", "created_by", "created_at", "deleted_at")
    list_select_related = ("organization", "latest__model", "created_by")
    search_fields = ("name", "organization__name")


@admin.register(ModelVersion)
class ModelVersionAdmin(ReadOnlyAdmin):
    """Published versions of models of all organizations."""

    list_display = ("model", "number", "job_pk", "size_bytes", "file_count", "sha256", "published_at")
    list_select_related = ("model",)
    search_fields = ("model__name", "sha256")


@admin.register(Workspace)
class WorkspaceAdmin(ReadOnlyAdmin):
    """Workspaces of all organizations."""

    list_display = ("name", "organization", "size_bytes", "created_by", "created_at", "deleted_at")
    list_select_related = ("organization", "created_by")
    search_fields = ("name", "organization__name")


@admin.register(WorkspaceImport)
class WorkspaceImportAdmin(ReadOnlyAdmin):
    """Imports of git repositories of all organizations."""

    list_display = ("name", "organization", "git_url", "state", "attempts", "error", "created_at", "ended_at")
    list_select_related = ("organization",)
    search_fields = ("name", "git_url", "organization__name")

    @admin.display(description=_("state"))
    def state(self, workspace_import: WorkspaceImport) -> str:
        """Return how far the import is."""
        return str(workspace_import.state.label)


@admin.register(DeletedFile)
class DeletedFileAdmin(ReadOnlyAdmin):
    """Recycle bins of all workspaces."""

    list_display = ("path", "workspace", "size_bytes", "entry_count", "deleted_by", "deleted_at", "kept_until")
    list_select_related = ("workspace", "deleted_by")
    search_fields = ("path", "workspace__name", "workspace__organization__name")


@admin.register(Allocation)
class AllocationAdmin(ReadOnlyAdmin):
    """Uploads in progress and results of runs, which count against quotas."""

    list_display = ("label", "kind", "organization", "size_bytes", "entry_count", "kept_until", "updated_at")
    list_filter = ("kind",)
    list_select_related = ("organization",)
    search_fields = ("label", "organization__name")


@admin.register(Registry)
class RegistryAdmin(ReadOnlyAdmin):
    """Registries with their user names, without passwords."""

    list_display = ("host", "organization", "username", "created_at")
    list_select_related = ("organization",)
    exclude = ("secret",)
