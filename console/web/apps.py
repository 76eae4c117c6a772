"""The Django app of the pages, which registers its template tags."""

from django.apps import AppConfig


class WebConfig(AppConfig):
    """The app `web`, which has template tags and no models."""

    name = "console.web"
    label = "web"
