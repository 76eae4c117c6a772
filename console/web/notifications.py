"""Pages of notifications, of a member's choice of emails, and of webhooks."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from billing.amounts import money
from console.accounts.roles import Capability
from console.notifications import services
from console.notifications.kinds import KINDS
from console.notifications.models import Notification
from console.web.access import MemberRequest, errors_as_message, errors_in_form, member
from console.web.templatetags.trainyard import moment_text
from jobs.messages import end_sentence, sweep_end_sentence

PAGE_SIZE = 50
"""How many notifications one page shows."""
DELIVERIES_SHOWN = 50
"""How many deliveries the page of a webhook shows, newest first."""


class WebhookForm(forms.Form):
    """The form of a new webhook."""

    url = forms.CharField(
        label="URL",
        max_length=500,
        widget=forms.URLInput(attrs={"placeholder": "https://", "autocomplete": "off"}),
        help_text=gettext_lazy("Gets a POST request with JSON for each notification."),
    )
    kinds = forms.MultipleChoiceField(
        label=gettext_lazy("Only these"),
        choices=[(name, kind.title) for name, kind in KINDS.items()],
        required=False,
        widget=forms.CheckboxSelectMultiple(attrs={"class": "form-check-input"}),
        help_text=gettext_lazy("None chosen: all."),
    )


@require_GET
@member(Capability.VIEW)
def notification_list(request: MemberRequest) -> HttpResponse:
    """List the notifications, newest first, with the member's choices of emails."""
    page = Paginator(services.visible(request.membership), PAGE_SIZE).get_page(request.GET.get("page"))
    choices = services.choices_of(request.membership)
    context = {
        "page": page,
        "rows": [_row(notification) for notification in page],
        "choices": [(name, _title(name), is_mailed) for name, is_mailed in choices.items()],
    }
    return render(request, "notifications/list.html", context)


@require_POST
@member(Capability.VIEW)
def notification_choices(request: MemberRequest) -> HttpResponse:
    """Store which kinds the member gets by email."""
    services.choose_mails(membership=request.membership, mailed=request.POST.getlist("mailed"))
    messages.success(request, _("The choices were saved."))
    return redirect("notification_list")


@never_cache
@require_http_methods(["GET", "POST"])
@member(Capability.MANAGE)
def webhook_list(request: MemberRequest) -> HttpResponse:
    """List the webhooks. POST creates one, and shows its signing key (`secret`) once."""
    form, secret = WebhookForm(request.POST if request.method == "POST" else None), ""
    if form.is_valid():
        with errors_in_form(form):
            _webhook, secret = services.create_webhook(membership=request.membership, **form.cleaned_data)
            form = WebhookForm()
    webhooks = services.webhooks_of(request.membership.organization).select_related("created_by")
    rows = [{"webhook": webhook, "titles": [_title(kind) for kind in webhook.kinds]} for webhook in webhooks]
    return render(request, "notifications/webhooks.html", {"form": form, "secret": secret, "rows": rows})


@require_GET
@member(Capability.MANAGE)
def webhook_detail(request: MemberRequest, pk: int) -> HttpResponse:
    """Show the log of a webhook's deliveries."""
    webhook = services.webhook_for(request.membership.organization, pk)
    deliveries = webhook.deliveries.select_related("notification")[:DELIVERIES_SHOWN]
    rows = [{"delivery": delivery, "title": _title(delivery.notification.kind)} for delivery in deliveries]
    return render(request, "notifications/webhook.html", {"webhook": webhook, "rows": rows})


@require_POST
@member(Capability.MANAGE)
def webhook_delete(request: MemberRequest, pk: int) -> HttpResponse:
    """Delete a webhook."""
    webhook = services.webhook_for(request.membership.organization, pk)
    services.delete_webhook(webhook=webhook, user=request.membership.user)
    messages.success(request, _("The webhook was deleted."))
    return redirect("webhook_list")


@require_POST
@member(Capability.MANAGE)
def webhook_send_again(request: MemberRequest, pk: int, delivery: int) -> HttpResponse:
    """Send a delivery once more."""
    webhook = services.webhook_for(request.membership.organization, pk)
    with errors_as_message(request):
        services.redeliver(webhook=webhook, delivery_pk=delivery)
        messages.success(request, _("It is sent again within seconds."))
    return redirect("webhook_detail", pk)


def _title(kind: str) -> str:
    """Return the title of a kind. After a downgrade, rows may have a kind of the later version: return its name."""
    return str(KINDS[kind].title) if kind in KINDS else kind


def _row(notification: Notification) -> dict[str, Any]:
    """Return a notification as a row: a title with a link, what it is about (`text`), and a sentence (`detail`)."""
    data = notification.data
    amounts = {name: money(data[name], data["currency"]) for name in data if name.endswith("_minor")}
    title, text, href, detail = _title(notification.kind), "", "", ""
    if notification.kind.startswith("job."):
        is_notebook = data.get("is_notebook", False)
        if is_notebook and notification.kind == "job.cancelled":
            title = _("A notebook was stopped")
        text = f"#{data['job']} {data['name']}"
        href = reverse("job_detail", args=[data["job"]])
        detail = end_sentence(
            data.get("reason", ""),
            is_hang_charged=data.get("is_hang_charged", False),
            is_free=data.get("charged_minor") == 0,
            is_notebook=is_notebook,
        )
    elif notification.kind == "sweep.ended":
        text, detail = data["name"], sweep_end_sentence(data)
        href = reverse("sweep_detail", args=[data["sweep"]])
    elif notification.kind == "notebook.ending":
        text = f"#{data['job']} {data['name']}"
        href = reverse("notebook_extend" if data["is_extensible"] else "job_detail", args=[data["job"]])
        when = moment_text(datetime.fromisoformat(data["ends_at"]))
        detail = _("It reaches its time limit at %(when)s.") % {"when": when}
    elif notification.kind == "files.expiring":
        text = ", ".join(f"#{job}" for job in data["jobs"])
        href = reverse("storage_usage")
    elif notification.kind == "budget.reached":
        member_email = data["of"]  # empty: the budget of the organization
        text, href = f"{data['percent']} % {member_email}".strip(), reverse("cost_list")
    elif notification.kind == "invoice.issued":
        text, href = f"{data['number']}: {amounts['total_minor']}", reverse("invoice_detail", args=[data["invoice"]])
    else:  # all other kinds are about one amount of the wallet
        text, href = next(iter(amounts.values()), ""), reverse("wallet")
    return {
        "notification": notification,
        "title": title,
        "text": text,
        "detail": detail,
        "href": href,
    }
