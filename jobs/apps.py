"""The Django app of `jobs`."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class JobsConfig(AppConfig):
    """See the package's docstring."""

    name = "jobs"
    verbose_name = _("Training")
