"""`manage.py backup` and `restore` on installations of their own: what is refused, and what a crash leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg
import pytest

from console.backup import archive
from console.services import Embedded

pytestmark = pytest.mark.flow
ROOT = Path(__file__).resolve().parents[3]
FILLED = """
from django.conf import settings
from django.core.management import call_command
settings.EMBEDDED.start(database=True, broker=False)
call_command("migrate", verbosity=0)
from console.accounts.models import User
from console.accounts.services import create_organization
from tests.factories.billing import wallet
user = User.objects.create_user("%s")
wallet(create_organization(user=user, name="A").organization, balance_minor=12_34)
"""
KILLED = """
import os, signal
from console.backup import archive, database
def die(*_arguments, **_named):
    os.kill(os.getpid(), signal.SIGKILL)
def half(source, sink):
    sink.write(source.read(100_000))
    sink.flush()
    die()
%s
from pathlib import Path
archive.restore(Path("%s"), force=True)
"""
CRASHES = {
    "while files are unpacked": "archive.os.sync = die",
    "before the database": "database.replace = die",
    "in the middle of the database": "database._copy = half",
    "between database and files": "archive._swap = die",
    "in the middle of the files": "swap = archive._swap\narchive._swap = lambda root: (swap(root), die())",
    "before the schema": "archive.call_command = die",
}
KEPT = {"while files are unpacked", "before the database", "in the middle of the database"}


class Place:
    """An installation in a folder of its own. Short, as unix sockets need it."""

    def __init__(self):
        self.var = Path(tempfile.mkdtemp(prefix="ty-"))
        self.embedded = Embedded(self.var)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINYARD_", "DJANGO_"))}
        self.environment = clean | {"TRAINYARD_VAR": str(self.var)}

    def manage(self, *words, **environment):
        return subprocess.run(
            [sys.executable, "manage.py", *map(str, words)],
            cwd=ROOT, env=self.environment | environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def shell(self, script):
        return self.manage("shell", "-v", "0", "-c", script)

    def fill(self, email):
        done = self.shell(FILLED % email)
        assert done.returncode == 0, done.stderr
        folder = self.var / "storage" / "datasets" / "a"
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(email.encode() * 1000)
        folder.chmod(0o555)

    def query(self, sql):
        address = {"host": str(self.embedded.socket_dir), "user": "postgres", "dbname": "trainyard"}
        self.embedded.start(database=True, broker=False)
        with psycopg.connect(**address, autocommit=True) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def people(self):
        return [email for (email,) in self.query("SELECT email FROM accounts_user ORDER BY email")]

    def data(self):
        return (self.var / "storage" / "datasets" / "a" / "data").read_bytes()

    def remove(self):
        self.embedded.stop()
        shutil.rmtree(self.var, ignore_errors=True)


@pytest.fixture(scope="module")
def origin():
    made = Place()
    made.fill("first@example.com")
    yield made
    made.remove()


@pytest.fixture(scope="module")
def backup(origin, tmp_path_factory):
    folder = tmp_path_factory.mktemp("backups") / "one"
    done = origin.manage("backup", folder)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.parent.iterdir()] == ["one"]
    return folder


@pytest.fixture
def place():
    made = Place()
    yield made
    made.remove()


@pytest.fixture(scope="module")
def template():
    made = Place()
    made.fill("second@example.com")
    made.embedded.stop()
    yield made.var
    made.remove()


@pytest.fixture
def filled(template, place):
    """An installation that somebody uses, stopped."""
    shutil.copytree(template, place.var, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns("run", "log"))
    return place


@pytest.fixture
def copied(backup, tmp_path):
    """A backup to spoil."""
    return Path(shutil.copytree(backup, tmp_path / "copy"))


def change(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def test_an_empty_installation_becomes_the_one_that_was_backed_up(origin, backup, place):
    done = place.manage("restore", backup)
    assert done.returncode == 0, done.stderr
    assert "the books balance" in done.stdout
    assert place.people() == ["first@example.com"]
    assert place.data() == origin.data()
    assert (place.var / "storage" / "datasets" / "a").stat().st_mode & 0o777 == 0o555
    assert (place.var / "secret_key").read_text() == (origin.var / "secret_key").read_text()
    money = "SELECT kind, posted_minor, held_minor FROM billing_account ORDER BY id"
    assert place.query(money) == origin.query(money)
    assert (12_34,) in place.query("SELECT posted_minor FROM billing_account")
    hidden = [path for root in ("storage", "runs", "sandbox") for path in (place.var / root).glob(".*")]
    assert hidden == []
    refused = place.manage("restore", backup)
    assert refused.returncode == 1
    assert "There are accounts in this database. --force" in refused.stderr


def test_a_backup_never_takes_the_place_of_another(origin, backup):
    done = origin.manage("backup", backup)
    assert done.returncode == 1
    assert "is there already" in done.stderr


def test_a_backup_that_fails_leaves_nothing(origin, tmp_path):
    script = """
from console.backup import archive, trees
from pathlib import Path
def full(*_arguments): raise OSError("disk full")
trees.pack = full
archive.take(Path("%s"))
"""
    done = origin.shell(script % (tmp_path / "folder" / "two"))
    assert done.returncode != 0
    assert "disk full" in done.stderr
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("part", ["database.dump", "storage.tar", "secret_key"])
@pytest.mark.parametrize("how", ["one bit", "shorter", "gone"])
def test_damage_is_noticed(copied, part, how):
    path = copied / part
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data if how == "one bit" else data[:-1])
    with pytest.raises(archive.DamagedBackup, match=part):
        archive.verify(copied)


def test_a_damaged_backup_changes_nothing(copied, place):
    with (copied / "storage.tar").open("ab") as file:
        file.write(b"more")
    for words in (["restore", copied], ["restore", copied, "--verify"]):
        done = place.manage(*words)
        assert done.returncode == 1
        assert "storage.tar is missing, or not as long as it was" in done.stderr
    assert not (place.var / "storage").exists()
    assert not (place.var / "postgres").exists()


def test_a_whole_backup_is_told_so(backup):
    assert archive.verify(backup)["format"] == 1


def test_a_part_that_leads_out_of_the_backup_is_not_read(copied):
    manifest = json.loads((copied / "manifest.json").read_text())
    change(copied, parts=manifest["parts"] | {"../one/secret_key": manifest["parts"]["secret_key"]})
    with pytest.raises(archive.DamagedBackup, match="is missing"):
        archive.verify(copied)


def test_what_is_no_backup_is_not_taken_for_one(copied, tmp_path):
    (copied / "manifest.json").unlink()
    for folder in (copied, tmp_path / "none"):
        with pytest.raises(archive.DamagedBackup, match="is no backup, or an unfinished one"):
            archive.verify(folder)


def test_a_newer_format_is_refused(copied):
    change(copied, format=2, version="9.0")
    with pytest.raises(archive.NewerBackup, match=r"Trainyard 9\.0. Upgrade this console first"):
        archive.verify(copied)


def test_a_newer_schema_is_refused(copied, place):
    known = json.loads((copied / "manifest.json").read_text())["migrations"]
    change(copied, migrations=[*known, "jobs.9999_of_next_year"], version="9.0")
    done = place.manage("restore", copied, "--force")
    assert done.returncode == 1
    assert "jobs.9999_of_next_year is not known here" in done.stderr
    assert not (place.var / "storage").exists()


def test_another_key_is_refused_where_somebody_else_keeps_it(backup, place):
    done = place.manage("restore", backup, SECRET_KEY="another" * 20)
    assert done.returncode == 1
    assert "SECRET_KEY is another than when" in done.stderr


def test_files_of_somebody_are_not_replaced_unasked(backup, place):
    (place.var / "storage" / "datasets" / "b").mkdir(parents=True)
    done = place.manage("restore", backup)
    assert done.returncode == 1
    assert f"There are files in {place.var / 'storage'}. --force" in done.stderr
    assert (place.var / "storage" / "datasets" / "b").exists()


def test_a_database_in_use_is_not_restored_into(backup, place):
    place.embedded.start(database=True, broker=False)
    with psycopg.connect(host=str(place.embedded.socket_dir), user="postgres", dbname="trainyard") as connection:
        connection.execute("SET application_name = 'a worker'")
        done = place.manage("restore", backup, "--force")
    assert done.returncode == 1
    assert "The database is in use (a worker)" in done.stderr
    assert not (place.var / "storage" / ".restore-unfinished").exists()


def test_a_database_that_says_no_keeps_what_it_had(copied, filled):
    place = filled
    # A trigger of the database itself forbids it, at its very end.
    place.query(
        "CREATE FUNCTION no() RETURNS event_trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF tg_tag = 'CREATE TRIGGER' THEN RAISE 'not today'; END IF; END $$"
    )
    place.query("CREATE SCHEMA apart; ALTER FUNCTION no SET SCHEMA apart")
    place.query("CREATE EVENT TRIGGER no ON ddl_command_start EXECUTE FUNCTION apart.no()")
    done = place.manage("restore", copied, "--force")
    assert done.returncode == 1
    assert "not today" in done.stderr
    assert "Nothing was changed" in done.stderr
    assert place.people() == ["second@example.com"]
    assert place.data().startswith(b"second")
    assert not (place.var / "storage" / ".restore-unfinished").exists()


@pytest.mark.parametrize("moment", CRASHES)
def test_a_restore_that_is_killed_is_repeated_or_never_was(origin, backup, filled, moment):
    done = filled.shell(KILLED % (CRASHES[moment], backup))
    assert done.returncode == -signal.SIGKILL, done.stderr
    if moment in KEPT:
        assert filled.people() == ["second@example.com"]
        assert filled.data().startswith(b"second")
    marks = [filled.var / root / archive.MARK for root in ("storage", "runs", "sandbox")]
    assert [mark.exists() for mark in marks] == [moment != "while files are unpacked"] * 3
    again = filled.manage("restore", backup, "--force")
    assert again.returncode == 0, again.stderr
    assert filled.people() == ["first@example.com"]
    assert filled.data() == origin.data()
    assert [path.name for path in (filled.var / "storage").iterdir()] == ["datasets"]


@pytest.mark.parametrize("command", ["up", "backup", "prepare"])
def test_half_an_installation_is_not_served(place, command):
    (place.var / "runs").mkdir()
    (place.var / "runs" / archive.MARK).touch()
    words = {"up": ["up"], "backup": ["backup", place.var / "never"], "prepare": ["prepare", "--trial"]}
    elsewhere = {"DATABASE_URL": "postgres://nobody@127.0.0.1:9/x", "REDIS_URL": "redis://127.0.0.1:9/0"}
    cluster = {"backend": "kubernetes", "in_cluster": True, "volume": {"claim": "a", "root": "/srv"}}
    told = {"SECRET_KEY": "k" * 60, "TRAINYARD_CLUSTERS": json.dumps({"default": cluster})}
    refused = place.manage(*words[command], **(elsewhere | told if command == "prepare" else {}))
    assert refused.returncode == 1
    assert "A restore was broken off" in refused.stderr
