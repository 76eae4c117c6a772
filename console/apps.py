"""The Django app `console`, with the management commands, and the choice of static files.

This module imports the Celery application, so that every process with Django sends tasks to the configured broker.
"""

from django.apps import AppConfig
from django.conf import settings
from django.contrib.staticfiles.apps import StaticFilesConfig

from console.celery import app as celery_app
from console.observability import tracing

__all__ = ["ConsoleConfig", "StaticFiles", "celery_app"]


class ConsoleConfig(AppConfig):
    """The app `console`."""

    name = "console"
    default = True  # this module has two configurations, so Django needs to know which one the app uses

    def ready(self) -> None:
        """Start tracing, if configured. Raises TracingMissing."""
        tracing.start(endpoint=settings.OTEL_EXPORTER_OTLP_ENDPOINT)


class StaticFiles(StaticFilesConfig):
    """Leaves out large files that no page uses, because compressing them takes long.

    They are a second API reference, the pages of Django REST framework, and other versions of htmx.
    """

    ignore_patterns = [
        *StaticFilesConfig.ignore_patterns, "redoc", "swagger-ui-es-bundle*", "swagger-ui.js*", "rest_framework",
        "django_htmx",
    ]  # fmt: skip
