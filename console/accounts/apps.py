"""The Django app of accounts."""

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class AccountsConfig(AppConfig):
    """Accounts, organizations and their services."""

    name = "console.accounts"
    label = "accounts"
    verbose_name = _("Users and organizations")

    def ready(self) -> None:
        """Connect the receivers that write the audit log, and those that end the access of OpenID clients."""
        autodiscover_modules("audit", "openid")  # they import models, which are loaded only now
