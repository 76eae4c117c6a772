"""The URLs of the console. Most packages list their own, which this module includes."""

from allauth.account.decorators import secure_admin_login
from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView, TemplateView

from console import api
from console.monitoring import health, metrics
from console.web import access, openid, operator_page
from console.web.organization import set_language

# Administrators log in on the same page as everyone, so that its limits and second factors apply to them.
admin.site.login = secure_admin_login(admin.site.login)  # type: ignore[method-assign]  # as allauth documents

urlpatterns = [
    path("healthz", health.live, name="healthz"),
    path("readyz", health.ready, name="readyz"),
    path("metrics", metrics.metrics, name="metrics"),
    path("", include("billing.webhooks")),
    *operator_page.urlpatterns,  # before the admin, whose patterns match every path below /admin/
    path("admin/", admin.site.urls),
    # The console's page `security` replaces allauth's overviews. Forms of allauth still redirect to these addresses.
    *(
        path(f"accounts/{overview}", RedirectView.as_view(pattern_name="security"))
        for overview in ("2fa/", "2fa/webauthn/", "sessions/")
    ),
    path("accounts/approval/", TemplateView.as_view(template_name="accounts/approval.html"), name="account_approval"),
    path("accounts/", include("allauth.urls")),
    *openid.urlpatterns,
    path("i18n/setlang/", set_language, name="set_language"),
    path("api/v1/", include(api.urlpatterns)),
    path("", include("console.web.urls")),
]

# The handlers of `api` answer with JSON below /api/, and with a page elsewhere.
handler400 = api.bad_request
handler403 = api.permission_denied
handler404 = api.page_not_found
handler429 = access.too_many_requests  # allauth calls it if a rate limit is exceeded; Django has no such handler
handler500 = api.server_error
