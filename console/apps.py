"""The Django app of the project itself: its management commands.

Imports the Celery application, so that every process that has loaded Django sends its tasks to our broker.
"""

from django.apps import AppConfig
from django.conf import settings

from console.celery import app as celery_app
from console.operations import tracing

__all__ = ["ConsoleConfig", "celery_app"]


class ConsoleConfig(AppConfig):
    """See the module's docstring."""

    name = "console"

    def ready(self) -> None:
        """Traces, where the settings ask for them. Raises TracingMissing."""
        tracing.start(endpoint=settings.OTEL_EXPORTER_OTLP_ENDPOINT)
