"""An operation for migrations that change many labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db.migrations.operations import AlterField, AlterModelOptions
from django.db.migrations.operations.base import Operation

if TYPE_CHECKING:
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor
    from django.db.migrations.state import ProjectState


class ChangeLabels(Operation):
    """Changes of labels, help texts and choices, which the database does not know, of many fields at once.

    After each single `AlterField` Django builds the classes of the field's model and of all related ones again, so that
    a hundred labels would take seconds. Here they are built once, when the next operation needs them.
    """

    reduces_to_sql = False

    def __init__(self, changes: list[AlterField | AlterModelOptions]) -> None:
        self.changes = changes

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return the class name and its arguments, for Django's writer of migrations."""
        return type(self).__name__, [self.changes], {}

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Change the state of the models."""
        if "apps" in vars(state):
            del state.apps  # a cached property
        for change in self.changes:
            change.state_forwards(app_label, state)

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Leave the database as it is."""

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Leave the database as it is."""

    def describe(self) -> str:
        """Return a sentence for `sqlmigrate` and `migrate --plan`."""
        return f"Change labels of {len(self.changes)} fields and models"
