"""Admin pages of node specs and price books. A published book is read-only."""

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
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.crypto import constant_time_compare, salted_hmac
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext
from unfold.admin import ModelAdmin, TabularInline
from unfold.decorators import action
from unfold.widgets import UnfoldAdminSelectWidget

from billing import costs, models, price_simulation, pricebooks
from billing.admin.amounts import AmountInput, input_value
from billing.amounts import MINUS, money, to_major
from billing.currencies import SUPPORTED, decimals
from billing.errors import BookRefused, NotPriced
from billing.selectors import default_currency
from console.accounts.reports import Report, Table, show
from console.core.readonly import row_or_404
from runtime.backends.slurm.config import SlurmConfig

PRICE_DECIMALS = 4
"""Decimals of a price in minor units, as many as its column has."""


class PriceForm(forms.ModelForm):  # type: ignore[type-arg]  # at run time Django's class takes no argument
    """The form of a price in the major unit of its book's currency."""

    def __init__(self, *args: Any, currency: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.currency = currency
        self.fields["amount"] = forms.DecimalField(
            label=_("Amount (%(currency)s)") % {"currency": currency},
            min_value=0,
            max_digits=14,  # as the column, which stores the same digits: `clean_amount` only moves the decimal point
            decimal_places=PRICE_DECIMALS + decimals(currency),
            widget=AmountInput,
        )
        if self.instance.amount is not None:
            self.initial["amount"] = input_value(to_major(self.instance.amount, currency), currency)

    def clean_amount(self) -> Decimal:
        """Convert the price to the minor unit."""
        amount: Decimal = self.cleaned_data["amount"]
        return amount.scaleb(decimals(self.currency))


class PriceFormSet(BaseInlineFormSet):  # type: ignore[type-arg]  # at run time Django's class takes no argument
    """The formset of a book's prices."""

    def get_form_kwargs(self, index: int | None) -> dict[str, Any]:
        """Give each form the book's currency."""
        return super().get_form_kwargs(index) | {"currency": _supported_currency(self.instance)}

    def clean(self) -> None:
        """Refuse duplicate prices. Django's own message would not name the price."""
        names: set[str] = set()
        for form in self.forms:
            if not form.is_valid() or not form.cleaned_data or form.cleaned_data.get("DELETE"):
                continue
            name = pricebooks.price_name(form.instance)
            if name in names:
                raise ValidationError(_("Duplicate price: %(price)s. Remove one.") % {"price": name})
            names.add(name)
        super().clean()


class PriceInline(TabularInline):  # type: ignore[misc]  # unfold publishes no types
    """The prices of a book, editable in drafts."""

    model = models.Price
    form = PriceForm
    formset = PriceFormSet
    extra = 1

    @admin.display(description=gettext_lazy("Amount"))
    def price(self, row: models.Price) -> str:
        """Show the amount of a published price."""
        return money(row.amount, row.book.currency, exact=True)

    def get_fields(self, _request: HttpRequest, obj: models.PriceBook | None = None) -> tuple[str, ...]:
        """Return the fields of a price. The amount can be edited in drafts only."""
        amount = "amount" if self._is_draft(obj) else "price"
        return ("kind", "product", "node_spec", "nodes_from", amount)

    def get_readonly_fields(self, _request: HttpRequest, obj: models.PriceBook | None = None) -> tuple[str, ...]:
        """Return the formatted amount for published books; `has_change_permission` makes all other fields read-only."""
        return () if self._is_draft(obj) else ("price",)

    def formfield_for_choice_field(self, db_field: Field[Any, Any], request: HttpRequest, **options: Any) -> Any:
        """Add an empty choice to `kind`. Without it, a browser submits the first kind for the empty extra row."""
        choices = db_field.get_choices(include_blank=True)
        return super().formfield_for_choice_field(db_field, request, **options | {"choices": choices})

    def _is_draft(self, book: models.PriceBook | None) -> bool:
        """Return whether the book's prices can be edited. On the page of a new book, `book` is None."""
        return book is None or book.published_at is None

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allowed in drafts only."""
        return self._is_draft(obj) and bool(super().has_add_permission(request, obj))

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allowed in drafts only."""
        return self._is_draft(obj) and bool(super().has_change_permission(request, obj))

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allowed in drafts only."""
        return self._is_draft(obj) and bool(super().has_delete_permission(request, obj))


class NodeSpecForm(forms.ModelForm):  # type: ignore[type-arg]  # at run time Django's class takes no argument
    """The form of a node spec."""

    def clean(self) -> dict[str, Any] | None:
        """Refuse parts of cores on Slurm, which assigns whole cores: fewer nodes would fit than the console expects."""
        cleaned_data = super().clean()
        # The form of an existing node spec has no field for cores, since they stay as they were sold.
        cpus = self.cleaned_data.get("cpus", self.instance.cpus)
        name = self.cleaned_data.get("cluster") or next(iter(settings.TRAINYARD_CLUSTERS))
        if cpus and cpus % 1 and isinstance(settings.TRAINYARD_CLUSTERS.get(name), SlurmConfig):
            message = _(
                "The cluster %(name)s uses Slurm, which assigns whole cores. Enter a whole number of CPU cores."
            )
            self.add_error("cpus" if "cpus" in self.fields else "cluster", message % {"name": name})
        return cleaned_data


@admin.register(models.NodeSpec)
class NodeSpecAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Node specs."""

    form = NodeSpecForm
    list_display = ("name", "title", "cluster", "cpus", "memory_mib", "gpus", "gpu_type", "position", "is_active")
    list_editable = ("position", "is_active")
    search_fields = ("name", "title")

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never allowed, because past jobs refer to their node spec. Deactivate the node spec instead."""
        return False

    def get_readonly_fields(self, _request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """Return the fields that stay as they were sold. The cluster may change: waiting jobs start on the new one."""
        return ("name", "cpus", "memory_mib", "gpus", "gpu_type") if obj else ()

    def formfield_for_dbfield(self, db_field: Field[Any, Any], request: HttpRequest, **options: Any) -> Any:
        """Offer the clusters of the settings as choices, and say that `gpu_type` must match the cluster's GPU label."""
        field = super().formfield_for_dbfield(db_field, request, **options)
        if db_field.name == "gpu_type":
            field.help_text = _("Must match the node's GPU label, for example NVIDIA-H200. Leave empty for any type.")
        if db_field.name != "cluster":
            return field
        names = list(settings.TRAINYARD_CLUSTERS)
        first = _("first cluster (%(name)s)") % {"name": names[0]}
        choices = [("", first), *((name, name) for name in names)]
        return forms.ChoiceField(
            required=False,
            choices=choices,
            widget=UnfoldAdminSelectWidget,
            label=field.label,
            help_text=field.help_text,
        )


@admin.register(models.PriceBook)
class PriceBookAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Price books: draft, publish, copy, compare."""

    list_display = ("name", "currency", "effective_from", "published_at")
    readonly_fields = ("published_at",)
    inlines = (PriceInline,)
    actions = ("publish", "copy", "compare")
    actions_detail = ("preview", "changes")

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Published books are read-only."""
        is_draft = obj is None or obj.published_at is None
        return is_draft and bool(super().has_change_permission(request, obj))

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allowed on the page of a draft, but not for the list's action, which could select published books."""
        is_draft = obj is not None and obj.published_at is None
        return is_draft and bool(super().has_delete_permission(request, obj))

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """Save the prices and warn about those that change by more than half."""
        super().save_related(request, form, formsets, change)
        for large_change in _large_changes(form.instance):
            messages.warning(
                request,
                _("Large change from the current price: %(change)s. Check it before you publish.")
                % {"change": large_change},
            )

    @admin.action(description=gettext_lazy("Publish (on its start date, or now)"), permissions=("change",))
    def publish(self, request: HttpRequest, books: QuerySet[models.PriceBook]) -> HttpResponse | None:
        """Publish drafts, each from its own date. Asks for confirmation if a price changes by more than half."""
        # By book and not by name, because two drafts can have the same name.
        changes_by_book = {book: changes for book in books if (changes := _large_changes(book))}
        # The digest confirms exactly these changes: a price may have changed since the page was shown.
        digest = salted_hmac("billing.admin.publish", repr(changes_by_book)).hexdigest()
        if changes_by_book and not constant_time_compare(request.POST.get("confirmed", ""), digest):
            context = {
                **self.admin_site.each_context(request),
                "title": _("Publish these prices?"),
                "changes_by_book": changes_by_book,
                "chosen": [book.pk for book in books],
                "confirmed": digest,
                "back": reverse("admin:billing_pricebook_changelist"),
            }
            return render(request, "admin/publish_prices.html", context)
        for book in books:
            try:
                pricebooks.publish(book=book)
            except BookRefused as error:
                messages.error(request, f"{book}: {error.message}")
            else:
                messages.success(request, _("%(book)s is published.") % {"book": book})
        return None

    @admin.action(description=gettext_lazy("Copy to a new draft"), permissions=("add",))
    def copy(self, request: HttpRequest, books: QuerySet[models.PriceBook]) -> None:
        """Copy a book to a draft."""
        for book in books:
            messages.success(request, _("%(book)s is ready to edit.") % {"book": pricebooks.copy(book=book)})

    @admin.action(description=gettext_lazy("Compare two price books"), permissions=("view",))
    def compare(self, request: HttpRequest, books: QuerySet[models.PriceBook]) -> HttpResponse | None:
        """Show the differences between two selected books."""
        chosen = list(books.order_by("effective_from", "pk"))
        if len(chosen) != 2:
            messages.error(request, _("Choose two price books."))
            return None
        return show(request, self, _diff_report(*chosen))

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Simulate last month with this price book"), permissions=("view",)
    )
    def preview(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show last month's cost per customer under the selected book."""
        book = row_or_404(models.PriceBook, object_id)
        last_month = costs.month_of().previous
        return show(request, self, _simulation_report(price_simulation.simulate_month(book=book, month=last_month)))

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Compare with the current price book"), permissions=("view",)
    )
    def changes(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show the differences from the current book."""
        book = row_or_404(models.PriceBook, object_id)
        try:
            current = pricebooks.current_book(currency=book.currency)
        except NotPriced as error:
            messages.error(request, str(error.message))
            return redirect("admin:billing_pricebook_change", object_id)
        return show(request, self, _diff_report(current, book))


def _simulation_report(simulation: price_simulation.Simulation) -> Report:
    """Return the page of a simulation: totals, a row for each customer, and notes about runs at their original cost."""
    currency = simulation.book.currency
    notes = [
        _("The draft has no price for %(what)s. The original cost is used for %(runs)d runs.")
        % {"what": purchase, "runs": runs}
        for purchase, runs in simulation.unpriced.items()
    ]
    if simulation.without_usage:
        notes.append(
            _("%(runs)d runs predate usage records; their original cost is used.") % {"runs": simulation.without_usage}
        )
    headers = [
        _("Customer"),
        _("Runs"),
        _("Charged"),
        _("With this price book"),
        pgettext("of an amount", "Change"),
        "%",
    ]
    rows = [
        [
            row.organization.name,
            row.runs,
            money(row.charged_minor, currency),
            money(row.simulated_minor, currency),
            money(row.change_minor, currency),
            _percent(row.change_fraction),
        ]
        for row in simulation.customers
    ]
    return Report(
        title=_("%(month)s with %(book)s") % {"month": simulation.month.name, "book": simulation.book},
        figures=(
            (_("Runs"), str(simulation.runs)),
            (_("Charged"), money(simulation.charged_minor, currency)),
            (_("With this price book"), money(simulation.simulated_minor, currency)),
            (
                pgettext("of an amount", "Change"),
                f"{money(simulation.change_minor, currency)} ({_percent(simulation.change_fraction)})",
            ),
        ),
        notes=notes,
        tables=(Table("", headers, rows),),
        back=reverse("admin:billing_pricebook_change", args=[simulation.book.pk]),
    )


def _diff_report(old: models.PriceBook, new: models.PriceBook) -> Report:
    """Return the page that compares two books, with a row for each price that differs."""
    changes = price_simulation.diff(old=old, new=new)
    rows = [
        [change.name, _amount(change.old, old), _amount(change.new, new), _percent(change.fraction)]
        for change in changes
    ]
    headers = [_("Price"), str(old), str(new), "%"]
    return Report(
        title=_("%(old)s and %(new)s") % {"old": old, "new": new},
        figures=((_("Price differences"), str(len(rows))),),
        tables=(Table("", headers, rows),),
        back=reverse("admin:billing_pricebook_changelist"),
    )


def _large_changes(draft: models.PriceBook) -> list[str]:
    """Return a line (name, old and new amount) for each price that a draft changes by more than half.

    It is compared with the book that is in effect when the draft begins.
    """
    now = timezone.now()
    try:
        replaced = pricebooks.current_book(currency=draft.currency, at=max(draft.effective_from or now, now))
    except NotPriced:
        return []
    return [
        f"{change.name}: {_amount(change.old, replaced)} → {_amount(change.new, draft)}"
        for change in price_simulation.large_changes(old=replaced, new=draft)
    ]


def _supported_currency(book: models.PriceBook) -> str:
    """Return the book's currency, or the default while a new book has none: price fields need its decimals."""
    return book.currency if book.currency in SUPPORTED else default_currency()


def _amount(value: Decimal | None, book: models.PriceBook) -> str:
    """Format a price of a book, with all its decimals; a dash if the book lacks it (None)."""
    return "–" if value is None else money(value, book.currency, exact=True)


def _percent(fraction: float | None) -> str:
    """Format a change with its sign: 0.5 is +50.0%. A dash for None."""
    return "–" if fraction is None else f"{fraction:+.1%}".replace("-", MINUS)
