"""Which migrations the version before can live with: during an upgrade, both versions use the new schema for a while.

The old code writes rows without new columns, reads and writes the old ones, and holds to no new rule. So a column may
come if the database itself fills it in (null, or `db_default`: Django's `default` is the new code's alone), and nothing
may go, get another name, get narrower or be forbidden. What must go, goes in two releases: in the first no code uses it
any more, in the second it is removed. Such a migration is listed in ACCEPTED, with its reason.
"""

from django.db import models
from django.db.migrations import operations as ops
from django.db.models import NOT_PROVIDED

RELEASED = {
    "accounts": "0002_free_checks",
    "billing": "0008_post_function",
    "jobs": "0002_retries_elastic_checks",
    "storage": "0001_initial",
}
"""The last migrations of the version before. At each release, the newest of each app come here."""
ACCEPTED: dict[str, str] = {
    "billing.0012_move_function": "a function more; the one that the version before calls stays",
}
"""`app.migration` -> why the version before can live with it all the same."""
ADDITIONS = (
    ops.CreateModel,
    ops.AddIndex,
    ops.AlterModelOptions,
    ops.AlterModelManagers,
    ops.RemoveIndex,
    ops.RenameIndex,
)
"""Tables nobody of old knows, and what the database alone sees."""
NOT_IN_DATABASE = {
    "choices", "validators", "verbose_name", "help_text", "editable", "blank", "default", "error_messages",
    "limit_choices_to", "related_name", "related_query_name", "serialize", "upload_to", "on_delete", "auto_now",
    "auto_now_add",
}  # fmt: skip


def unreleased(loader):
    """(key, migration, the state before it) of ours that the version before does not have, in order."""
    for target in loader.graph.leaf_nodes():
        if target[0] in RELEASED:
            assert (target[0], RELEASED[target[0]]) in loader.graph.nodes
    before = {
        node for app, name in RELEASED.items() for node in loader.graph.forwards_plan((app, name))
    }  # fmt: skip
    state = loader.project_state(list(RELEASED.items()))
    plan = [
        node for leaf in loader.graph.leaf_nodes() if leaf[0] in RELEASED for node in loader.graph.forwards_plan(leaf)
    ]
    for key in dict.fromkeys(plan):
        migration = loader.graph.nodes[key]
        if key not in before:
            yield key, migration, state
            state = migration.mutate_state(state, preserve=True)


def breaks(operation, app, state, *, known):
    """Why the version before could not live with this operation; empty where it can. `known`: models it has."""
    if isinstance(operation, ops.SeparateDatabaseAndState):
        inner = [
            one for each in operation.database_operations for one in [breaks(each, app, state, known=known)] if one
        ]
        return "; ".join(inner)
    name = getattr(operation, "model_name_lower", "")
    if isinstance(operation, ADDITIONS) or (name and (app, name) not in known):
        return ""
    if isinstance(operation, ops.AddField):
        return _added(operation.field, operation.name)
    if isinstance(operation, ops.AlterField):
        return _altered(state.models[app, name].fields[operation.name], operation.field, operation.name)
    return f"{type(operation).__name__}: say in ACCEPTED why the version before can live with it"


def _added(field, name):
    filled = field.null or field.db_default is not NOT_PROVIDED or isinstance(field, models.ManyToManyField)
    if not filled:
        return f"{name}: the version before inserts rows without it, and the database would refuse them: db_default="
    return f"{name}: unique" if field.unique and not field.null else ""


def _altered(old, new, name):
    _, old_path, _, before = old.deconstruct()
    _, new_path, _, after = new.deconstruct()
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} - NOT_IN_DATABASE
    if old_path != new_path:
        return f"{name}: {old_path} becomes {new_path}"
    if "max_length" in changed and (after.get("max_length") or 0) >= (before.get("max_length") or 0):
        changed.discard("max_length")
    for gives in ("null", "db_default"):
        if gives in changed and after.get(gives) not in (None, False):
            changed.discard(gives)
    return f"{name}: {', '.join(sorted(changed))}" if changed else ""
