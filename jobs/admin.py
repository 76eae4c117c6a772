"""Administrators' work on jobs: products are theirs to change; orders, jobs and attempts are there to be read."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from unfold.admin import ModelAdmin

from console.accounts.readonly import ReadOnlyAdmin, ReadOnlyInline
from jobs import models


@admin.register(models.Product)
class ProductAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """What is sold."""

    list_display = ("name", "title", "mode", "reference_seconds_per_epoch", "headroom", "position", "is_active")
    list_editable = ("position", "is_active")

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never: orders of the past name it. Take it off the offer instead."""
        return False

    def get_readonly_fields(self, _request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """Prices name a product by its name, and its mode decides how it is priced."""
        return ("name", "mode") if obj else ()


class AttemptInline(ReadOnlyInline):
    """The tries."""

    model = models.Attempt
    fields = ("number", "claimed_at", "started_at", "finished_at", "reason", "detail")


class EventInline(ReadOnlyInline):
    """What happened."""

    model = models.JobEvent
    fields = ("created_at", "kind", "attempt", "actor", "data")


@admin.register(models.Job)
class JobAdmin(ReadOnlyAdmin):
    """Jobs, read-only: their state is the lifecycle's."""

    list_display = ("id", "organization", "name", "state", "reason", "node_spec", "nodes", "queued_at", "finished_at")
    list_filter = ("state", "reason", "framework")
    list_select_related = ("organization", "node_spec")
    search_fields = ("id", "name", "organization__name")
    inlines = (AttemptInline, EventInline)


@admin.register(models.Order)
class OrderAdmin(ReadOnlyAdmin):
    """Orders."""

    list_display = ("id", "organization", "product", "placed_by", "created_at")
    list_select_related = ("organization", "product", "placed_by")
    search_fields = ("id", "organization__name")
