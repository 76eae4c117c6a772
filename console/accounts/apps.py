"""The Django app of the floor."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class AccountsConfig(AppConfig):
    """Accounts, organizations and their services."""

    name = "console.accounts"
    label = "accounts"
    verbose_name = _("Accounts")
