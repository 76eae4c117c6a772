"""The admin page of the audit log. It is not in `console.accounts`, because it describes actions of all packages."""

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from console.accounts.models import AuditEvent
from console.core.readonly import LargeTableAdmin
from console.web import activity


@admin.register(AuditEvent)
class AuditEventAdmin(LargeTableAdmin):
    """The audit log."""

    list_display = ("created_at", "actor", "description", "target", "organization", "address")
    list_select_related = ("actor", "organization")
    readonly_fields = ("description",)
    search_fields = ("action", "target", "actor__email", "organization__name")

    @admin.display(description=_("what happened"))
    def description(self, event: AuditEvent) -> str:
        """Describe the action in the reader's language."""
        return activity.describe(event)
