"""The Django app of `billing`."""

from django.apps import AppConfig
from django.core import checks
from django.utils.translation import gettext_lazy as _

from billing.checks import check_payment_settings


class BillingConfig(AppConfig):
    """Registers the checks of the payment settings."""

    name = "billing"
    verbose_name = _("Billing")

    def ready(self) -> None:
        """Register the checks, which `manage.py up` and `manage.py prepare` run before anything starts."""
        checks.register(check_payment_settings)
