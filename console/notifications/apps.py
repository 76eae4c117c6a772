"""The Django app of notifications."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class NotificationsConfig(AppConfig):
    """Notifications and webhooks."""

    name = "console.notifications"
    label = "notifications"
    verbose_name = _("Notifications")
