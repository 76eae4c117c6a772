"""Upgrades without downtime: the previous release works on the new schema, and replicas migrate one at a time.

During an upgrade both releases use the new schema. The old code writes rows without new columns, and reads and writes
the old ones. So a new column must be filled by the database (null, or `db_default`: only new code knows Django's
`default`), and nothing may be removed, renamed, narrowed or forbidden. A removal takes two releases: one that no longer
uses the column, and one that removes it. The migration that removes it is listed in ACCEPTED.
"""

import contextlib
import threading

import pytest
from django.core.management import call_command
from django.db import connections, migrations, models
from django.db.migrations import operations as ops
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ModelState, ProjectState
from django.db.models import NOT_PROVIDED

from console.core.migrations import ChangeLabels
from console.management.commands import migrate
from console.supervision import schema

RELEASED = {
    "accounts": "0002_free_checks",
    "billing": "0008_post_function",
    "jobs": "0002_retries_elastic_checks",
    "storage": "0001_initial",
}
"""The last migrations of the previous release. Update them at each release."""
ACCEPTED = {
    "billing.0012_move_function": "adds a function; the one that the previous release calls stays",
    "billing.0019_storage_charges": "widens a constraint for prices of storage, which old code never writes",
    "billing.0021_indexes_of_large_tables": "replaces the index of an entry's account by one that begins with it",
    "billing.0022_indexes_of_receipts": "replaces the index of a receipt's organization by ones that begin with it",
    "jobs.0005_every_metric_point": "removes a constraint; the previous release drops repeated steps itself",
    "jobs.0009_capacity_snapshot": "renames the model in Django; the table and its columns stay",
    "jobs.0017_job_search": "replaces the index of a job's workspace by one that begins with it",
    "jobs.0023_indexes_of_large_tables": "replaces the index of a job's code by one that begins with it",
    "jobs.0026_members_of_jobs": "fills a column that the previous release does not know",
    "storage.0003_retention_of_older_rows": "fills columns that the previous release does not know",
}
"""Why the previous release can live with a migration that `incompatibility` refuses."""
ADDITIONS = (
    ops.CreateModel, ops.AddIndex, ops.RemoveIndex, ops.RenameIndex, ops.AlterModelOptions, ops.AlterModelManagers,
)  # fmt: skip
NOT_IN_DATABASE = {
    "choices", "validators", "verbose_name", "help_text", "editable", "blank", "default", "error_messages",
    "limit_choices_to", "related_name", "related_query_name", "serialize", "upload_to", "on_delete", "auto_now",
    "auto_now_add",
}  # fmt: skip
"""Attributes of fields that the database does not know."""


def unreleased(loader):
    """Yield our migrations that the previous release lacks, in order: key, migration, the state before it."""
    graph = loader.graph
    assert {key for key in RELEASED.items() if key not in graph.nodes} == set()
    released = {node for key in RELEASED.items() for node in graph.forwards_plan(key)}
    plan = [node for leaf in graph.leaf_nodes() if leaf[0] in RELEASED for node in graph.forwards_plan(leaf)]
    state = loader.project_state(list(RELEASED.items()))
    for key in dict.fromkeys(plan):
        if key not in released:
            yield key, graph.nodes[key], state
            state = graph.nodes[key].mutate_state(state, preserve=True)


def incompatibility(operation, app, state, *, known):
    """Return why the previous release, which has the `known` models, cannot live with the operation, or ""."""
    parts = []
    if isinstance(operation, ops.SeparateDatabaseAndState):
        parts = operation.database_operations
    elif isinstance(operation, ChangeLabels):  # it leaves the database as it is: none of its fields may change there
        parts = [each for each in operation.changes if not isinstance(each, ops.AlterModelOptions)]
        known = {(app, each.model_name_lower) for each in parts}
    if isinstance(operation, (ops.SeparateDatabaseAndState, ChangeLabels)):
        return "; ".join(filter(None, (incompatibility(each, app, state, known=known) for each in parts)))
    name = getattr(operation, "model_name_lower", "")
    if isinstance(operation, ADDITIONS) or (name and (app, name) not in known):
        return ""
    if isinstance(operation, ops.AddField):
        field = operation.field
        if not field.null and field.db_default is NOT_PROVIDED and not isinstance(field, models.ManyToManyField):
            return f"{operation.name}: needs a db_default, or old code could not insert rows"
        return f"{operation.name}: unique" if field.unique and not field.null else ""
    if isinstance(operation, ops.AlterField):
        _, before, _, old = state.models[app, name].fields[operation.name].deconstruct()
        _, after, _, new = operation.field.deconstruct()
        changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} - NOT_IN_DATABASE
        return f"{operation.name}: {before} becomes {after} {sorted(changed)}" if changed or before != after else ""
    return f"{type(operation).__name__}: say in ACCEPTED why the previous release can live with it"


def test_the_previous_release_can_live_with_every_new_migration():
    loader = MigrationLoader(None)
    known = set(loader.project_state(list(RELEASED.items())).models)
    refused, checked = {}, set()
    for (app, name), migration, state in unreleased(loader):
        checked.add((app, name))
        current = state.clone()
        for operation in migration.operations:
            if reason := incompatibility(operation, app, current, known=known):
                refused.setdefault(f"{app}.{name}", []).append(reason)
            operation.state_forwards(app, current)
    assert {name: reasons for name, reasons in refused.items() if name not in ACCEPTED} == {}
    assert set(ACCEPTED) <= set(refused), "ACCEPTED lists a migration that is compatible"
    released = {node for key in RELEASED.items() for node in loader.graph.forwards_plan(key)}
    assert checked == {key for key in loader.disk_migrations if key[0] in RELEASED} - released


CHAR = models.CharField(max_length=10)
LABEL = migrations.AlterField("job", "text", models.CharField("words", max_length=10, choices=[("a", "b")]))
SHORTER = migrations.AlterField("job", "text", models.CharField(max_length=5))
COMPATIBLE = {
    "a nullable column": migrations.AddField("job", "x", models.IntegerField(null=True)),
    "a column with a database default": migrations.AddField("job", "x", models.IntegerField(default=0, db_default=0)),
    "a new table": migrations.CreateModel("thing", [("id", models.BigAutoField(primary_key=True))]),
    "a column of a new table": migrations.AddField("thing", "x", models.IntegerField()),
    "an index": migrations.AddIndex("job", models.Index(fields=["id"], name="x")),
    "a label": LABEL,
    "labels": ChangeLabels([LABEL]),
}
INCOMPATIBLE = {
    "a column without a default": migrations.AddField("job", "x", models.IntegerField()),
    "a column with Django's default": migrations.AddField("job", "x", models.IntegerField(default=0)),
    "a unique column with a default": migrations.AddField("job", "x", models.IntegerField(db_default=0, unique=True)),
    "a removed column": migrations.RemoveField("job", "text"),
    "a shorter column": SHORTER,
    "a shorter column among labels": ChangeLabels([SHORTER]),
    "a removed column among labels": ChangeLabels([migrations.RemoveField("job", "text")]),
    "a constraint": migrations.AddConstraint("job", models.CheckConstraint(condition=models.Q(id__gt=0), name="x")),
    "SQL": migrations.RunSQL("SELECT 1"),
    "a hidden operation": migrations.SeparateDatabaseAndState([migrations.RemoveField("job", "text")]),
}


@pytest.mark.parametrize("name", [*COMPATIBLE, *INCOMPATIBLE])
def test_additions_are_compatible_and_other_changes_are_not(name):
    state = ProjectState()
    state.add_model(ModelState("jobs", "job", [("id", models.BigAutoField(primary_key=True)), ("text", CHAR)]))
    reason = incompatibility({**COMPATIBLE, **INCOMPATIBLE}[name], "jobs", state, known={("jobs", "job")})
    assert (reason == "") == (name in COMPATIBLE), reason


@pytest.mark.django_db
def test_replicas_migrate_one_at_a_time_although_others_fail(monkeypatch):
    running, peaks, together, never = [], [], threading.Barrier(3), threading.Event()

    def handle(*_arguments, **_options):
        running.append(1)
        peaks.append(len(running))
        with schema.schema_lock():  # its holder may enter again
            never.wait(0.2)  # time for another replica to enter, were there no lock
        running.pop()
        raise RuntimeError

    monkeypatch.setattr(migrate.Migrate, "handle", handle)

    def replica():
        together.wait()
        with contextlib.suppress(RuntimeError):
            call_command("migrate", verbosity=0, skip_checks=True)
        connections.close_all()

    threads = [threading.Thread(target=replica, daemon=True) for _number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)  # a time-out, in case a lock is never released
    assert peaks == [1, 1, 1]
