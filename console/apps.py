"""The Django app of the project itself: its management commands.

Imports the Celery application, so that every process that has loaded Django sends its tasks to our broker.
"""

from django.apps import AppConfig

from console.celery import app as celery_app

__all__ = ["ConsoleConfig", "celery_app"]


class ConsoleConfig(AppConfig):
    """See the module's docstring."""

    name = "console"
