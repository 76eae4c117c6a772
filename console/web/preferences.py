"""A person's settings across organizations: the time zone."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods

from console.accounts import services, zones
from console.web.access import errors_as_message, logged_in_user


@require_http_methods(["GET", "POST"])
@login_required
def time_zone(request: HttpRequest) -> HttpResponse:
    """Set the time zone of pages and emails."""
    user = logged_in_user(request)
    if request.method == "POST":
        with errors_as_message(request):
            services.choose_time_zone(user=user, name=request.POST.get("time_zone", ""))
            messages.success(request, _("The time zone was changed."))
        return redirect("time_zone")
    browser = zones.zone(user.browser_time_zone).key
    return render(request, "accounts/time_zone.html", {"zones": zones.names(), "browser_zone": browser})
