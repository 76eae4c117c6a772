"""The Django app of the project itself, with its management commands, and the choice of static files.

It imports the Celery application, so that every process with Django sends tasks to the configured broker.
"""

from django.apps import AppConfig
from django.conf import settings
from django.contrib.staticfiles.apps import StaticFilesConfig

from console.celery import app as celery_app
from console.observability import tracing

__all__ = ["ConsoleConfig", "StaticFiles", "celery_app"]


class ConsoleConfig(AppConfig):
    """See the module's docstring."""

    name = "console"
    default = True  # Django must be told which of this module's two configurations the app `console` uses

    def ready(self) -> None:
        """Start tracing, if configured. Raises TracingMissing."""
        tracing.start(endpoint=settings.OTEL_EXPORTER_OTLP_ENDPOINT)


class StaticFiles(StaticFilesConfig):
    """Leaves out large files of the API reference that no page uses: compressing them takes longer than all others."""

    ignore_patterns = [*StaticFilesConfig.ignore_patterns, "redoc", "swagger-ui-es-bundle*", "swagger-ui.js*"]
