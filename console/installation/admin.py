"""Admin pages of the brand, the legal texts and the notices to everyone."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin

from console.installation import selectors
from console.installation.models import MAX_LOGO_BYTES, MAX_LOGO_PIXELS, MIN_LOGO_PIXELS, Brand, LegalText, Notice

INVALID_LOGO = _("Choose a PNG picture of at most 256 KiB.")
"""The error of a file that cannot be the logo: it is no PNG picture, or it is larger than MAX_LOGO_BYTES."""


class InstallationAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """An admin that clears the cache of `selectors.installation` after each change.

    So this process shows a change at once. Other processes show it after `selectors.CACHE_SECONDS`.
    """

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save a row, and clear the cache."""
        super().save_model(request, obj, form, change)
        selectors.clear_cache()

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Delete a row, and clear the cache."""
        super().delete_model(request, obj)
        selectors.clear_cache()

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Delete the rows that were selected in the list, and clear the cache."""
        super().delete_queryset(request, queryset)
        selectors.clear_cache()


class BrandForm(forms.ModelForm):  # type: ignore[type-arg]  # not generic at run time
    """The form of the brand. The logo is uploaded as a file, and stored in the database."""

    logo_file = forms.ImageField(
        label=_("Logo"),
        required=False,
        help_text=_("A square PNG picture with sides of 28 to 1024 pixels, of at most 256 KiB."),
        error_messages={"invalid_image": INVALID_LOGO},
    )
    remove_logo = forms.BooleanField(label=_("Use the default logo"), required=False)

    class Meta:
        model = Brand
        fields = ("name", "color", "support")

    def clean_logo_file(self) -> bytes:
        """Return the bytes of the chosen picture; empty without one. Raises ValidationError if it cannot be a logo."""
        file = self.cleaned_data["logo_file"]
        if not file:
            return b""
        # ImageField has set `file.image`, the opened picture.
        if file.image.format != "PNG" or file.size > MAX_LOGO_BYTES:
            raise ValidationError(INVALID_LOGO)
        width, height = file.image.size
        if width != height or not MIN_LOGO_PIXELS <= width <= MAX_LOGO_PIXELS:
            message = _("This picture has %(width)d × %(height)d pixels. Choose a square one of 28 to 1024 pixels.")
            raise ValidationError(message, params={"width": width, "height": height})
        return bytes(file.read())

    def save(self, commit: bool = True) -> Brand:
        """Save the brand. A chosen logo replaces the old one; a logo that is neither replaced nor removed stays."""
        if data := self.cleaned_data["logo_file"]:
            self.instance.logo = data
        elif self.cleaned_data["remove_logo"]:
            self.instance.logo = b""
        brand: Brand = super().save(commit)
        return brand


@admin.register(Brand)
class BrandAdmin(InstallationAdmin):
    """The brand: name, colour, logo and contact of the console."""

    form = BrandForm
    list_display = ("name", "color", "support", "changed_at")

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return whether a brand may be added: only while there is none."""
        return super().has_add_permission(request) and not Brand.objects.exists()


@admin.register(LegalText)
class LegalTextAdmin(InstallationAdmin):
    """Terms and privacy policies. The newest version of each applies. Published ones are never changed or deleted."""

    list_display = ("kind", "version", "published_at")
    list_filter = ("kind",)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False, because customers accepted the text as it is."""
        return False

    has_delete_permission = has_change_permission


@admin.register(Notice)
class NoticeAdmin(InstallationAdmin):
    """Notices at the top of every page."""

    list_display = ("text", "level", "begins_at", "ends_at")
