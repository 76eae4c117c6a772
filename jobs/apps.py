"""The Django app of `jobs`."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from jobs.in_use import open_jobs_using
from storage.in_use import register


class JobsConfig(AppConfig):
    """See the package's docstring."""

    name = "jobs"
    verbose_name = _("Training")

    def ready(self) -> None:
        """Register the finder of open jobs, which storage calls before it deletes anything."""
        register(open_jobs_using)
