"""`manage.py backup` and `restore` on installations of their own: what is refused, and what a crash leaves."""

import json
import shutil
import signal
from pathlib import Path

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from console.accounts.models import User
from console.backup import archive
from tests.factories.accounts import UserFactory
from tests.flows.console import Console
from tests.migrations import copy_migrated_database

pytestmark = [pytest.mark.slow, pytest.mark.flow, pytest.mark.xdist_group("backup")]
FILLED = """
from django.conf import settings
settings.EMBEDDED.start(database=True, broker=False)
from console.accounts.models import User
from console.accounts.services import create_organization
from tests.factories.billing import wallet
user = User.objects.create_user("first@example.com")
wallet(create_organization(user=user, name="A").organization, balance_minor=12_34)
"""
KILLED = """
import os, signal
from pathlib import Path
from console.backup import archive, database
def die(*_arguments, **_named):
    os.kill(os.getpid(), signal.SIGKILL)
def half(source, sink):
    sink.write(source.read(100_000))
    sink.flush()
    die()
%s
archive.restore(Path("%s"), force=True)
"""
CRASHES = {
    "while files are unpacked": "archive.os.sync = die",
    "before the database": "database.replace = die",
    "in the middle of the database": "database._copy_statements = half",
    "between database and files": "archive._swap_entries = die",
    "in the middle of the files": (
        "swap = archive._swap_entries\narchive._swap_entries = lambda root: (swap(root), die())"
    ),
    "before the schema": "archive.call_command = die",
}
BEFORE_THE_DATABASE = {"while files are unpacked", "before the database", "in the middle of the database"}
REFUSE = """
CREATE SCHEMA apart;
CREATE FUNCTION apart.refuse() RETURNS event_trigger LANGUAGE plpgsql AS
$$ BEGIN IF tg_tag = 'CREATE TRIGGER' THEN RAISE 'not today'; END IF; END $$;
CREATE EVENT TRIGGER refuse ON ddl_command_start EXECUTE FUNCTION apart.refuse();
"""
"""The database refuses the end of a restore."""


class Place(Console):
    """An installation of which commands alone run, and its database."""

    def __init__(self, var):
        super().__init__(var, Path("/no/images"))

    @property
    def file(self):
        return self.var / "storage" / "datasets" / "a" / "data"

    def query(self, sql):
        self.embedded.start(database=True, broker=False)
        return super().query(sql)

    def owner(self):
        """Whose accounts and files these are."""
        ((email,),) = self.query("SELECT email FROM accounts_user")
        assert self.file.read_bytes() == email.encode() * 1000
        return email.partition("@")[0]

    def remove(self):
        self.embedded.stop()
        super().remove()


@pytest.fixture(scope="module")
def origin(short_folders):
    created = Place(short_folders())
    copy_migrated_database(created.var)
    done = created.manage("shell", "-v", "0", "-c", FILLED)
    assert done.returncode == 0, done.stderr
    created.file.parent.mkdir(parents=True)
    created.file.write_bytes(b"first@example.com" * 1000)
    created.file.parent.chmod(0o555)
    yield created
    created.remove()


@pytest.fixture(scope="module")
def backup(origin, tmp_path_factory):
    folder = tmp_path_factory.mktemp("backups") / "one"
    done = origin.manage("backup", folder)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.parent.iterdir()] == ["one"]
    return folder


@pytest.fixture
def place(short_folders):
    created = Place(short_folders())
    yield created
    created.remove()


@pytest.fixture
def filled(origin, backup, place):
    """An installation of somebody else, with a key of its own."""
    origin.embedded.stop()
    shutil.copytree(
        origin.var, place.var, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns("run", "log")
    )
    (place.var / "secret_key").write_text("another" * 20)
    place.query("UPDATE accounts_user SET email = 'second@example.com'")
    place.file.write_bytes(b"second@example.com" * 1000)
    return place


@pytest.fixture
def here(transactional_db, settings, tmp_path, origin):
    """This process's settings: a console with the key of `origin`, on an external database."""
    settings.EMBEDDED_DATABASE = False
    settings.VAR_DIR = tmp_path
    settings.SECRET_KEY = (origin.var / "secret_key").read_text().strip()
    return settings


@pytest.fixture
def copied(backup, tmp_path):
    """A backup to damage."""
    return Path(shutil.copytree(backup, tmp_path / "copy"))


def change(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def test_a_backup_does_not_replace_another(backup):
    with pytest.raises(CommandError, match="already exists"):
        call_command("backup", backup)


def test_a_failed_backup_leaves_nothing(here, tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError("disk full")

    monkeypatch.setattr(archive.trees, "pack", full)
    with pytest.raises(CommandError, match="disk full"):
        call_command("backup", tmp_path / "folder" / "two")
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize(
    ("part", "damage"), [("database.dump", "one bit"), ("storage.tar", "shorter"), ("secret_key", "missing")]
)
def test_damage_is_detected(copied, part, damage):
    path = copied / part
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage != "missing":
        path.write_bytes(data if damage == "one bit" else path.name.encode())
    with pytest.raises(archive.DamagedBackup, match=part):
        archive.verify(copied)


def test_only_a_complete_backup_of_a_known_format_is_verified(backup, copied, tmp_path):
    assert archive.verify(backup)["format"] == 1
    change(copied, format=2, version="9.0")
    with pytest.raises(archive.NewerBackup, match=r"Trainyard 9\.0. Upgrade this console first"):
        archive.verify(copied)
    (copied / "manifest.json").unlink()
    for folder in (copied, tmp_path / "none"):
        with pytest.raises(archive.DamagedBackup, match="is no backup, or an unfinished one"):
            archive.verify(folder)


def add_migration(copied, _settings):
    known = json.loads((copied / "manifest.json").read_text())["migrations"]
    change(copied, migrations=[*known, "jobs.9999_of_next_year"], version="9.0")


def lengthen(copied, _settings):
    with (copied / "storage.tar").open("ab") as file:
        file.write(b"more")


def change_key(_copied, settings):
    settings.SECRET_KEY = "another" * 20


def add_files(_copied, settings):
    (settings.TRAINYARD_STORAGE_ROOT / "datasets" / "b").mkdir(parents=True)


def add_account(_copied, _settings):
    UserFactory()


@pytest.mark.parametrize(
    ("spoil", "options", "sentence"),
    [
        (lengthen, [], "storage.tar is missing, or has another size than in the manifest"),
        (lengthen, ["--verify"], "storage.tar is missing, or has another size than in the manifest"),
        (add_migration, ["--force"], "jobs.9999_of_next_year is not known here"),
        (change_key, [], "SECRET_KEY differs from"),
        (add_files, [], "There are files in .*/storage. --force"),
        (add_account, [], "This database has accounts. --force"),
    ],
)
def test_a_refused_restore_changes_nothing(copied, here, spoil, options, sentence):
    spoil(copied, here)
    before = set(here.TRAINYARD_STORAGE_ROOT.rglob("*")), User.objects.count()
    with pytest.raises(CommandError, match=sentence):
        call_command("restore", copied, *options)
    assert (set(here.TRAINYARD_STORAGE_ROOT.rglob("*")), User.objects.count()) == before


def test_a_database_in_use_is_not_replaced(backup, here):
    address = connection.settings_dict
    with psycopg.connect(host=address["HOST"], user="postgres", dbname=address["NAME"]) as other:
        other.execute("SET application_name = 'a worker'")
        with pytest.raises(CommandError, match=r"The database is in use \(a worker\)"):
            call_command("restore", backup, "--force")
    assert not here.TRAINYARD_STORAGE_ROOT.exists()


def test_an_unfinished_restore_is_neither_backed_up_nor_served(here, place, tmp_path):
    here.TRAINYARD_RUNS_ROOT.mkdir()
    (here.TRAINYARD_RUNS_ROOT / archive.UNFINISHED_MARKER).touch()
    with pytest.raises(CommandError, match="A restore was interrupted"):
        call_command("backup", tmp_path / "never")
    (place.var / "runs").mkdir()
    (place.var / "runs" / archive.UNFINISHED_MARKER).touch()
    cluster = {"backend": "kubernetes", "in_cluster": True, "volume": {"claim": "a", "root": "/srv"}}
    deployed = {
        "DATABASE_URL": "postgres://nobody@127.0.0.1:9/x", "REDIS_URL": "redis://127.0.0.1:9/0",
        "SECRET_KEY": "k" * 60, "TRAINYARD_CLUSTERS": json.dumps({"default": cluster}),
    }  # fmt: skip
    for refused in (place.manage("up"), place.manage("prepare", "--trial", **deployed)):
        assert refused.returncode == 1
        assert "A restore was interrupted" in refused.stderr


def test_a_restore_that_fails_or_is_killed_changes_nothing_or_can_be_repeated(origin, backup, filled):
    """One installation is restored again and again: each attempt is killed later than the one before."""
    roots = [filled.var / name for name in ("storage", "runs", "sandbox")]
    filled.query(REFUSE)
    refused = filled.manage("restore", backup, "--force")
    assert refused.returncode == 1
    for sentence in ("not today", "Nothing was changed"):
        assert sentence in refused.stderr
    assert filled.owner() == "second"
    assert not any((root / archive.UNFINISHED_MARKER).exists() for root in roots)
    filled.query("DROP EVENT TRIGGER refuse")

    for moment, crash in CRASHES.items():
        killed = filled.manage("shell", "-v", "0", "-c", KILLED % (crash, backup))
        assert killed.returncode == -signal.SIGKILL, (moment, killed.stderr)
        if moment in BEFORE_THE_DATABASE:
            assert filled.owner() == "second", moment
        marks = [(root / archive.UNFINISHED_MARKER).exists() for root in roots]
        assert marks == [moment != "while files are unpacked"] * 3, moment

    restored = filled.manage("restore", backup, "--force")
    assert restored.returncode == 0, restored.stderr
    assert "the books balance" in restored.stdout
    assert filled.owner() == "first"
    assert filled.file.parent.stat().st_mode & 0o777 == 0o555
    assert (filled.var / "secret_key").read_text() == (origin.var / "secret_key").read_text()
    assert (12_34,) in filled.query("SELECT posted_minor FROM billing_account")
    assert [path for root in roots for path in root.glob(".*")] == []
