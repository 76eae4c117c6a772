"""The Django app of the installation's own settings."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class InstallationConfig(AppConfig):
    """Brand, legal texts and notices."""

    name = "console.installation"
    label = "installation"
    verbose_name = _("Installation")
