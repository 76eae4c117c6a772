"""The Django app of the pages, which registers its template tags."""

from django.apps import AppConfig


class WebConfig(AppConfig):
    """See the package's docstring."""

    name = "console.web"
    label = "web"
