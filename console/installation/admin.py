"""Admin pages of the brand, the legal texts and the notices."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin

from console.installation import selectors
from console.installation.models import MAX_LOGO_BYTES, PNG_SIGNATURE, Brand, LegalText, Notice


class ClearCacheMixin:
    """Clears the cached installation after each change, so that this process shows the change at once.

    Other processes show it after `selectors.CACHE_SECONDS`.
    """

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save, and clear the cache."""
        super().save_model(request, obj, form, change)  # type: ignore[misc]  # of ModelAdmin
        selectors.clear_cache()

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Delete, and clear the cache."""
        super().delete_model(request, obj)  # type: ignore[misc]  # of ModelAdmin
        selectors.clear_cache()


class BrandForm(forms.ModelForm):  # type: ignore[type-arg]  # not generic at run time
    """The brand, with its logo as a file."""

    logo_file = forms.FileField(
        label=_("Logo"), required=False, help_text=_("A square PNG picture of at most 256 KiB.")
    )
    remove_logo = forms.BooleanField(label=_("Use the default logo"), required=False)

    class Meta:
        model = Brand
        fields = ("name", "color", "support")

    def clean_logo_file(self) -> bytes:
        """Return the picture's bytes; empty without a file. Raises ValidationError."""
        file: UploadedFile[Any] | None = self.cleaned_data["logo_file"]
        data = file.read(MAX_LOGO_BYTES + 1) if file else b""
        if data and (len(data) > MAX_LOGO_BYTES or not data.startswith(PNG_SIGNATURE)):
            raise ValidationError(_("Choose a PNG picture of at most 256 KiB."))
        return bytes(data)

    def save(self, commit: bool = True) -> Brand:
        """Save the brand with the chosen logo."""
        if data := self.cleaned_data["logo_file"]:
            self.instance.logo = data
        elif self.cleaned_data["remove_logo"]:
            self.instance.logo = b""
        brand: Brand = super().save(commit)
        return brand


@admin.register(Brand)
class BrandAdmin(ClearCacheMixin, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """The brand."""

    form = BrandForm
    list_display = ("name", "color", "support", "changed_at")

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Allowed while there is no brand: at most one row may exist."""
        return super().has_add_permission(request) and not Brand.objects.exists()


@admin.register(LegalText)
class LegalTextAdmin(ClearCacheMixin, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Legal texts. The newest version of a kind applies; a published version is never changed or deleted."""

    list_display = ("kind", "version", "published_at")
    list_filter = ("kind",)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Never allowed: customers accepted the text as it is."""
        return False

    has_delete_permission = has_change_permission


@admin.register(Notice)
class NoticeAdmin(ClearCacheMixin, ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Notices to everyone."""

    list_display = ("text", "level", "begins_at", "ends_at")
