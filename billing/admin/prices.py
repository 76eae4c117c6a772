"""Node specs and price books. The one rule: a published book is shown, never edited."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db.models import Field, QuerySet
from django.forms import BaseInlineFormSet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.admin import ModelAdmin, TabularInline
from unfold.decorators import action
from unfold.widgets import UnfoldAdminSelectWidget

from billing import costs, models, previews, pricebooks
from billing.errors import BookRefused, NotPriced
from billing.wording import money
from console.accounts.reports import Report, Table, show


class PriceFormSet(BaseInlineFormSet):  # type: ignore[type-arg]  # at run time Django's class takes no argument
    """The prices of a book as they are typed."""

    def clean(self) -> None:
        """Refuse a price that is there twice, and name it."""
        seen: set[str] = set()
        for form in self.forms:
            if not form.is_valid() or not form.cleaned_data or form.cleaned_data.get("DELETE"):
                continue
            name = pricebooks.price_name(form.instance)
            if name in seen:
                raise ValidationError(_("This price is there twice: %(price)s.") % {"price": name})
            seen.add(name)
        super().clean()


class PriceInline(TabularInline):  # type: ignore[misc]  # unfold publishes no types
    """The prices of a book, editable while it is a draft."""

    model = models.Price
    formset = PriceFormSet
    extra = 1

    def _is_draft(self, book: models.PriceBook | None) -> bool:
        return book is None or book.published_at is None

    def has_add_permission(self, _request: HttpRequest, obj: Any = None) -> bool:
        """In a draft only."""
        return self._is_draft(obj)

    def has_change_permission(self, _request: HttpRequest, obj: Any = None) -> bool:
        """In a draft only."""
        return self._is_draft(obj)

    def has_delete_permission(self, _request: HttpRequest, obj: Any = None) -> bool:
        """In a draft only."""
        return self._is_draft(obj)


@admin.register(models.NodeSpec)
class NodeSpecAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """What nodes there are."""

    list_display = ("name", "title", "cluster", "cpus", "memory_mib", "gpus", "gpu_type", "position", "is_active")
    list_editable = ("position", "is_active")
    search_fields = ("name", "title")

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never: jobs of the past name it. Take it off the offer instead."""
        return False

    def get_readonly_fields(self, _request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """What was bought under a name stays what it was; where it runs may change: what waits then starts there."""
        return ("name", "cpus", "memory_mib", "gpus", "gpu_type") if obj else ()

    def formfield_for_dbfield(self, db_field: Field[Any, Any], request: HttpRequest, **options: Any) -> Any:
        """The cluster is one of those that settings name; a type of GPU is written as that cluster has it."""
        field = super().formfield_for_dbfield(db_field, request, **options)
        if db_field.name == "gpu_type":
            field.help_text = _("On Kubernetes as the machines' label has it, with dashes; empty: any type.")
        if db_field.name != "cluster":
            return field
        names = list(settings.TRAINYARD_CLUSTERS)
        first = _("the first (%(name)s)") % {"name": names[0]}
        choices = [("", first), *((name, name) for name in names)]
        told = {"label": field.label, "help_text": field.help_text}
        return forms.ChoiceField(required=False, choices=choices, widget=UnfoldAdminSelectWidget, **told)


@admin.register(models.PriceBook)
class PriceBookAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Draft, publish from a date, supersede."""

    list_display = ("name", "currency", "effective_from", "published_at")
    readonly_fields = ("published_at",)
    inlines = (PriceInline,)
    actions = ("publish", "copy", "compare")
    actions_detail = ("preview", "changes")

    def has_change_permission(self, _request: HttpRequest, obj: Any = None) -> bool:
        """Drafts only; published books are shown as they are."""
        return obj is None or obj.published_at is None

    def has_delete_permission(self, _request: HttpRequest, obj: Any = None) -> bool:
        """Drafts only."""
        return obj is not None and obj.published_at is None

    @admin.action(description=gettext_lazy("Publish (from its date, or now)"))
    def publish(self, request: HttpRequest, books: QuerySet[models.PriceBook]) -> None:
        """Publish drafts."""
        for book in books:
            try:
                begins = book.effective_from if book.effective_from and book.effective_from > timezone.now() else None
                pricebooks.publish(book=book, effective_from=begins)
            except BookRefused as error:
                messages.error(request, f"{book}: {error.message}")
            else:
                messages.success(request, _("%(book)s is published.") % {"book": book})

    @admin.action(description=gettext_lazy("Copy to a new draft"))
    def copy(self, request: HttpRequest, books: QuerySet[models.PriceBook]) -> None:
        """Begin the next book."""
        for book in books:
            messages.success(request, _("%(book)s is ready to edit.") % {"book": pricebooks.copy(book=book)})

    @admin.action(description=gettext_lazy("Compare two books"))
    def compare(self, request: HttpRequest, books: QuerySet[models.PriceBook]) -> HttpResponse | None:
        """What differs between the two that were chosen."""
        chosen = list(books.order_by("effective_from", "pk"))
        if len(chosen) != 2:
            messages.error(request, _("Choose two books."))
            return None
        return show(request, self, _diff_report(*chosen))

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Preview: last month under this book"), permissions=("view",)
    )
    def preview(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """What last month would have cost, customer by customer."""
        book = get_object_or_404(models.PriceBook, pk=object_id)
        return show(request, self, _preview_report(previews.preview(book=book, month=costs.month_of().before)))

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Changes against the book that holds now"), permissions=("view",)
    )
    def changes(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """What differs from the present prices."""
        book = get_object_or_404(models.PriceBook, pk=object_id)
        try:
            present = pricebooks.current_book(currency=book.currency)
        except NotPriced as error:
            messages.error(request, str(error.message))
            return redirect("admin:billing_pricebook_change", object_id)
        return show(request, self, _diff_report(present, book))


def _preview_report(found: previews.Preview) -> Report:
    currency = found.book.currency
    notes = [
        _("The draft has no price for %(what)s: %(runs)d runs are counted at what they cost.")
        % {"what": what, "runs": runs}
        for what, runs in found.unpriced.items()
    ]
    if found.unknown:
        notes.append(
            _("%(runs)d runs of before usage was kept are counted at what they cost.") % {"runs": found.unknown}
        )
    headers = [_("Customer"), _("Runs"), _("Charged"), _("Under this book"), _("Change"), "%"]
    rows = [
        [
            row.organization.name,
            row.runs,
            money(row.charged_minor, currency),
            money(row.would_minor, currency),
            money(row.change_minor, currency),
            _percent(row.change),
        ]
        for row in found.customers
    ]
    return Report(
        title=_("%(month)s under %(book)s") % {"month": found.month.name, "book": found.book},
        figures=(
            (_("Runs"), str(found.runs)),
            (_("Charged"), money(found.charged_minor, currency)),
            (_("Under this book"), money(found.would_minor, currency)),
            (_("Change"), f"{money(found.change_minor, currency)} ({_percent(found.change)})"),
        ),
        notes=notes,
        tables=(Table("", headers, rows),),
        back=reverse("admin:billing_pricebook_change", args=[found.book.pk]),
    )


def _diff_report(old: models.PriceBook, new: models.PriceBook) -> Report:
    changes = previews.diff(old=old, new=new)
    rows = [[change.name, _amount(change.old), _amount(change.new), _percent(change.fraction)] for change in changes]
    headers = [_("Price (minor units)"), str(old), str(new), "%"]
    return Report(
        title=_("%(old)s and %(new)s") % {"old": old, "new": new},
        figures=((_("Prices that differ"), str(len(rows))),),
        tables=(Table("", headers, rows),),
        back=reverse("admin:billing_pricebook_changelist"),
    )


def _amount(value: Decimal | None) -> str:
    return "–" if value is None else f"{value:f}".rstrip("0").rstrip(".") if "." in f"{value:f}" else f"{value:f}"


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{fraction:+.1%}"
