"""Every address of the console. The one rule: a room lists its own addresses; here they are only mounted."""

from importlib.util import find_spec

from django.contrib import admin
from django.urls import include, path

from console import api, health

urlpatterns = [
    path("healthz", health.live),
    path("readyz", health.ready),
    path("admin/", admin.site.urls),
    path("accounts/", include("allauth.urls")),
    path("i18n/", include("django.conf.urls.i18n")),
    path("api/v1/", include(api.urlpatterns)),
]
for _module in ("billing.webhooks", "console.web.urls"):
    if find_spec(_module):
        urlpatterns.append(path("", include(_module)))

handler400 = api.bad_request
handler403 = api.permission_denied
handler404 = api.page_not_found
handler500 = api.server_error
