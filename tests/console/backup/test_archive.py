"""`manage.py backup` and `restore` on whole installations: what is refused, and what a crash leaves behind."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from console import deployment
from console.accounts.models import User
from console.backup import archive
from console.supervision.embedded import Embedded
from tests.console.processes import wait_for
from tests.factories.accounts import UserFactory
from tests.flows.console import ROOT, Console
from tests.migrations import copy_migrated_database

pytestmark = [pytest.mark.slow, pytest.mark.flow, pytest.mark.xdist_group("backup")]
FILL_AND_BACK_UP = """
from django.conf import settings
from django.core.management import call_command
settings.EMBEDDED.start(database=True, broker=False)
from console.accounts.models import User
from console.accounts.services import create_organization
from tests.factories.billing import wallet
user = User.objects.create_user("first@example.com")
wallet(create_organization(user=user, name="A").organization, balance_minor=12_34)
call_command("backup", "%s")
"""
"""Starts the database, creates a customer with a wallet, and makes a backup."""
RESTORES = """
import os, signal, sys
from pathlib import Path
from console.backup import archive, database
def die(*_arguments, **_named):
    os.kill(os.getpid(), signal.SIGKILL)
def half(source, sink):
    sink.write(source.read(100_000))
    sink.flush()
    die()
for crash in map(eval, sys.stdin):
    if not (child := os.fork()):
        exec(crash)
        try:
            archive.restore(Path("%s"), force=True)
        except archive.BackupRefused as refused:
            print(ascii(str(refused)), flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""For each line of input, forks a process. It executes the line as code, which breaks something, and then restores.

Prints how the process ended."""
CRASHES = {
    "while files are unpacked": "archive.os.sync = die",
    "before the database": "database.replace = die",
    "in the middle of the database": "database._copy_statements = half",
    "between database and files": "archive._swap_entries = die",
    "in the middle of the files": (
        "swap = archive._swap_entries\narchive._swap_entries = lambda root: (swap(root), die())"
    ),
    "before the migrations": "archive.call_command = die",
}
"""Code that kills a restore, by the moment of its death, in the order of a restore."""
BEFORE_THE_DATABASE = {"while files are unpacked", "before the database", "in the middle of the database"}
REFUSE = """
CREATE SCHEMA apart;
CREATE FUNCTION apart.refuse() RETURNS event_trigger LANGUAGE plpgsql AS
$$ BEGIN IF tg_tag = 'CREATE TRIGGER' THEN RAISE 'not today'; END IF; END $$;
CREATE EVENT TRIGGER refuse ON ddl_command_start EXECUTE FUNCTION apart.refuse();
"""
"""Lets the database refuse the last statements of a restore, which create triggers."""
OTHER_SESSIONS = """
SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'
"""


class Installation(Console):
    """An installation that runs its database and commands, but none of the console's processes."""

    def __init__(self, var):
        super().__init__(var, Path("/no/images"))

    @property
    def file(self):
        return self.var / "storage" / "datasets" / "a" / "data"

    def query(self, sql):
        self.embedded.start(database=True, broker=False)
        return super().query(sql)

    def owner(self):
        """Return whose account and file the installation has, `first` or `second`. Both must be the same person's."""
        ((email,),) = self.query("SELECT email FROM accounts_user")
        assert self.file.read_bytes() == email.encode() * 1000
        return email.partition("@")[0]

    def remove(self):
        self.embedded.stop()
        super().remove()


@pytest.fixture(scope="module")
def origin(short_folders, tmp_path_factory):
    """An installation, and its backup."""
    created = Installation(short_folders())
    created.backup = tmp_path_factory.mktemp("backups") / "one"
    copy_migrated_database(created.var)
    created.file.parent.mkdir(parents=True)
    created.file.write_bytes(b"first@example.com" * 1000)
    created.file.parent.chmod(0o555)  # as of a dataset version; a restore must keep the mode
    done = created.manage("shell", "-v", "0", "-c", FILL_AND_BACK_UP % created.backup)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in created.backup.parent.iterdir()] == ["one"]
    yield created
    created.remove()


@pytest.fixture(scope="module")
def backup(origin):
    return origin.backup


@pytest.fixture
def target(origin, short_folders):
    """An installation over which the backup is restored: with another account, another file and another key."""
    created = Installation(short_folders())
    origin.embedded.stop()  # the files of a running PostgreSQL cannot be copied
    shutil.copytree(
        origin.var, created.var, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns("run", "log")
    )
    (created.var / "secret_key").write_text("another" * 20)
    created.query("UPDATE accounts_user SET email = 'second@example.com'")
    created.file.write_bytes(b"second@example.com" * 1000)
    yield created
    created.remove()


@pytest.fixture
def console_settings(transactional_db, settings, tmp_path, origin):
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
    """Change entries of a backup's manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.mark.usefixtures("console_settings")
def test_a_backup_replaces_no_other_and_leaves_nothing_if_it_fails(backup, tmp_path, monkeypatch):
    with pytest.raises(CommandError, match="already exists"):
        call_command("backup", backup)

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


def test_a_refused_restore_changes_nothing(copied, console_settings):
    known = json.loads((copied / "manifest.json").read_text())["migrations"]
    storage, tar, key = console_settings.TRAINYARD_STORAGE_ROOT, copied / "storage.tar", console_settings.SECRET_KEY

    def refused(sentence, *options):
        before = set(storage.rglob("*")), User.objects.count()
        with pytest.raises(CommandError, match=sentence):
            call_command("restore", copied, *options)
        assert (set(storage.rglob("*")), User.objects.count()) == before

    whole = tar.read_bytes()
    tar.write_bytes(whole + b"more")
    for options in ([], ["--verify"]):
        refused("storage.tar is missing, or has another size than in the manifest", *options)
    tar.write_bytes(whole)
    change(copied, migrations=[*known, "jobs.9999_of_next_year"], version="9.0")
    refused("jobs.9999_of_next_year is not known here", "--force")
    change(copied, migrations=known)
    console_settings.SECRET_KEY = "another" * 20
    refused("SECRET_KEY differs from")
    console_settings.SECRET_KEY = key
    address = connection.settings_dict
    with psycopg.connect(host=address["HOST"], user="postgres", dbname=address["NAME"]) as other:
        other.execute("SET application_name = 'a worker'")
        refused(r"The database is in use \(a worker\)", "--force")
    assert not storage.exists()
    (storage / ".outputs" / "b").mkdir(parents=True)  # outputs of jobs, although hidden
    refused("There are files in .*/storage. --force")
    (storage / ".outputs").rename(storage / "datasets")
    refused("There are files in .*/storage. --force")
    UserFactory()
    refused("This database has accounts. --force")


def test_an_unfinished_restore_is_neither_backed_up_nor_served(console_settings, tmp_path, monkeypatch):
    console_settings.TRAINYARD_RUNS_ROOT.mkdir()
    (console_settings.TRAINYARD_RUNS_ROOT / archive.UNFINISHED_MARKER).touch()
    monkeypatch.setattr(deployment, "findings", list)  # else `prepare` may refuse the settings of tests first
    console_settings.EMBEDDED = Embedded(tmp_path)  # `up` stops these servers at its end
    monkeypatch.setattr(signal, "signal", lambda *_arguments: None)  # else `up` would leave its handlers here
    for command in (["backup", tmp_path / "never"], ["prepare"], ["up"]):
        with pytest.raises(CommandError, match="A restore was interrupted"):
            call_command(*command)


def test_a_restore_that_fails_or_is_killed_changes_nothing_or_can_be_repeated(origin, backup, target):
    """One installation is restored again and again: each attempt is killed later than the one before."""
    roots = [target.var / name for name in ("storage", "runs", "sandbox")]
    command = [sys.executable, "manage.py", "shell", "-v", "0", "-c", RESTORES % backup]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=target.environment, text=True, stdin=pipe, stdout=pipe) as restores:

        def restore(crash=""):
            """Restore with this crash. Return the next line that RESTORES prints."""
            # A restore refuses a database in use, and PostgreSQL ends a killed attempt's session a moment later.
            wait_for(lambda: target.query(OTHER_SESSIONS) == [])
            print(repr(crash), file=restores.stdin, flush=True)
            return restores.stdout.readline()

        target.query(REFUSE)
        refused = restore()
        for sentence in ("not today", "Nothing was changed"):
            assert sentence in refused
        assert restores.stdout.readline() == "0\n"
        assert target.owner() == "second"
        assert not any((root / archive.UNFINISHED_MARKER).exists() for root in roots)
        target.query("DROP EVENT TRIGGER refuse")

        for moment, crash in CRASHES.items():
            assert restore(crash) == f"{-signal.SIGKILL}\n", moment
            if moment in BEFORE_THE_DATABASE:
                assert target.owner() == "second", moment
            marks = [(root / archive.UNFINISHED_MARKER).exists() for root in roots]
            assert marks == [moment != "while files are unpacked"] * 3, moment  # written once all files are unpacked

    restored = target.manage("restore", backup, "--force")
    assert restored.returncode == 0, restored.stderr
    assert "the books balance" in restored.stdout
    assert target.owner() == "first"
    assert target.file.parent.stat().st_mode & 0o777 == 0o555  # as in `origin`
    assert (target.var / "secret_key").read_text() == (origin.var / "secret_key").read_text()
    assert (12_34,) in target.query("SELECT posted_minor FROM billing_account")
    assert [path for root in roots for path in root.glob(".*")] == []  # no marker and no unpacked files are left
