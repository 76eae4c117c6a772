"""The Django app of the project itself, its management commands, and what of others' static files it serves.

Imports the Celery application, so that every process that has loaded Django sends its tasks to our broker.
"""

from django.apps import AppConfig
from django.conf import settings
from django.contrib.staticfiles.apps import StaticFilesConfig

from console.celery import app as celery_app
from console.operations import tracing

__all__ = ["ConsoleConfig", "StaticFiles", "celery_app"]


class ConsoleConfig(AppConfig):
    """See the module's docstring."""

    name = "console"
    default = True  # of the two here

    def ready(self) -> None:
        """Traces, where the settings ask for them. Raises TracingMissing."""
        tracing.start(endpoint=settings.OTEL_EXPORTER_OTLP_ENDPOINT)


class StaticFiles(StaticFilesConfig):
    """Leaves out what no page of ours asks for: compressing it takes longer than all the rest."""

    ignore_patterns = [*StaticFilesConfig.ignore_patterns, "redoc", "swagger-ui-es-bundle*", "swagger-ui.js*"]
