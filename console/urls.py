"""Every address of the console. The one rule: a room lists its own addresses; here they are only mounted."""

from django.contrib import admin
from django.urls import include, path

from console import api
from console.operations import health, metrics
from console.web.organization import set_language

urlpatterns = [
    path("healthz", health.live, name="healthz"),
    path("readyz", health.ready, name="readyz"),
    path("metrics", metrics.metrics, name="metrics"),
    path("admin/", admin.site.urls),
    path("accounts/", include("allauth.urls")),
    path("i18n/setlang/", set_language, name="set_language"),
    path("api/v1/", include(api.urlpatterns)),
    path("", include("billing.webhooks")),
    path("", include("console.web.urls")),
]

handler400 = api.bad_request
handler403 = api.permission_denied
handler404 = api.page_not_found
handler500 = api.server_error
