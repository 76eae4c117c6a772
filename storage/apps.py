"""The Django app of `storage`."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class StorageConfig(AppConfig):
    """Images, datasets, models and workspaces."""

    name = "storage"
    verbose_name = _("Storage")
