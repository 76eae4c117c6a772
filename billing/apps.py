"""The Django app of `billing`."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class BillingConfig(AppConfig):
    """See the package's docstring."""

    name = "billing"
    verbose_name = _("Billing")
