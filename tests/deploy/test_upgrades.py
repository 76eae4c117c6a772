"""An upgrade stops nobody: the version before works on the schema of this one, and replicas migrate one at a time."""

import threading

import pytest
from django.core.management import call_command
from django.db import connections, migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ModelState, ProjectState

from console import schema
from console.management.commands import migrate
from tests.deploy import upgrades
from tests.deploy.upgrades import ACCEPTED, breaks, unreleased


def test_the_version_before_can_live_with_every_new_migration():
    loader = MigrationLoader(None)
    known = set(loader.project_state(list(upgrades.RELEASED.items())).models)
    found = {}
    for (app, name), migration, state in unreleased(loader):
        current = state.clone()
        for operation in migration.operations:
            if reason := breaks(operation, app, current, known=known):
                found.setdefault(f"{app}.{name}", []).append(reason)
            operation.state_forwards(app, current)
    assert {name: reasons for name, reasons in found.items() if name not in ACCEPTED} == {}
    assert set(ACCEPTED) <= set(found), "listed, and there is nothing wrong with it"
    assert all(len(reason) > 20 for reason in ACCEPTED.values())


def test_the_plan_is_read_whole():
    loader = MigrationLoader(None)
    names = {f"{app}.{name}" for (app, name), _migration, _state in unreleased(loader)}
    on_disk = {f"{app}.{name}" for app, name in loader.disk_migrations if app in upgrades.RELEASED}
    old = {
        f"{app}.{name}" for leaf in upgrades.RELEASED.items() for app, name in loader.graph.forwards_plan(leaf)
    }  # fmt: skip
    assert names == on_disk - old
    assert "jobs.0003_queue_rooms_clusters" in names


TEXT = models.CharField(max_length=10)
HARMLESS = {
    "a column that may be null": migrations.AddField("job", "x", models.IntegerField(null=True)),
    "a column the database fills": migrations.AddField("job", "x", models.IntegerField(default=0, db_default=0)),
    "a new table": migrations.CreateModel("thing", [("id", models.BigAutoField(primary_key=True))]),
    "a column of a new table": migrations.AddField("thing", "x", models.IntegerField()),
    "an index": migrations.AddIndex("job", models.Index(fields=["id"], name="x")),
    "longer": migrations.AlterField("job", "text", models.CharField(max_length=20)),
    "may be null now": migrations.AlterField("job", "text", models.CharField(max_length=10, null=True)),
    "other words": migrations.AlterField("job", "text", models.CharField("words", max_length=10, choices=[("a", "b")])),
}
HARMFUL = {
    "a column that must be told": migrations.AddField("job", "x", models.IntegerField()),
    "a column that only new code fills": migrations.AddField("job", "x", models.IntegerField(default=0)),
    "a unique column with one default": migrations.AddField("job", "x", models.IntegerField(db_default=0, unique=True)),
    "a column goes": migrations.RemoveField("job", "text"),
    "a column has another name": migrations.RenameField("job", "text", "words"),
    "a table has another name": migrations.RenameModel("job", "task"),
    "a table goes": migrations.DeleteModel("job"),
    "a table lies elsewhere": migrations.AlterModelTable("job", "other"),
    "shorter": migrations.AlterField("job", "text", models.CharField(max_length=5)),
    "must be told now": migrations.AlterField("job", "maybe", models.IntegerField()),
    "another type": migrations.AlterField("job", "text", models.IntegerField()),
    "unique now": migrations.AlterField("job", "text", models.CharField(max_length=10, unique=True)),
    "the database fills it no more": migrations.AlterField("job", "filled", models.IntegerField(default=0)),
    "a new rule": migrations.AddConstraint("job", models.CheckConstraint(condition=models.Q(id__gt=0), name="x")),
    "together unique": migrations.AlterUniqueTogether("job", {("id", "text")}),
    "by hand": migrations.RunSQL("SELECT 1"),
    "by code": migrations.RunPython(migrations.RunPython.noop),
    "hidden in another": migrations.SeparateDatabaseAndState([migrations.RemoveField("job", "text")]),
}


def state():
    fields = [("id", models.BigAutoField(primary_key=True)), ("text", TEXT), ("maybe", models.IntegerField(null=True))]
    made = ProjectState()
    made.add_model(ModelState("jobs", "job", [*fields, ("filled", models.IntegerField(default=0, db_default=0))]))
    return made


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_added_is_harmless(name):
    assert breaks(HARMLESS[name], "jobs", state(), known={("jobs", "job")}) == ""


@pytest.mark.parametrize("name", HARMFUL)
def test_what_old_code_would_trip_over_is_refused(name):
    assert breaks(HARMFUL[name], "jobs", state(), known={("jobs", "job")})


@pytest.mark.django_db(transaction=True)
def test_replicas_migrate_one_at_a_time(monkeypatch):
    inside, most, together = [], [], threading.Barrier(3)

    def watched(*_arguments, **_options):
        inside.append(1)
        most.append(len(inside))
        gate.wait(0.2)  # long enough for another to come in, were the door open
        inside.pop()

    gate = threading.Event()
    monkeypatch.setattr(migrate.Migrate, "handle", watched)

    def replica():
        together.wait()
        call_command("migrate", verbosity=0, skip_checks=True)
        connections.close_all()

    threads = [threading.Thread(target=replica) for _number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


@pytest.mark.django_db(transaction=True)
def test_whoever_dies_while_it_is_its_turn_leaves_the_door_open():
    with schema.taking_turns(), schema.taking_turns():
        pass
    with pytest.raises(RuntimeError), schema.taking_turns():
        raise RuntimeError
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [schema.TURN])
        assert cursor.fetchone() == (True,)
        cursor.execute("SELECT pg_advisory_unlock(%s)", [schema.TURN])
