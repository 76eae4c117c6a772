"""A backup: a folder with the database, the files, and a manifest that says what they must be. Take one, put one back.

Hides in which order things are written so that they fit together. The one rule: the database is read first and files
after it. Files that a row names are kept for days after the row is gone (`storage.sweeping`), so whatever the copied
rows name is still there when the files are copied; what came later is removed by the sweep some day.

    manifest.json    what this is, of which version, and the SHA-256 of every part
    database.dump    pg_dump's custom format
    storage.tar runs.tar sandbox.tar    datasets and workspaces; logs and results; the payments sandbox's state
    secret_key       where this installation made its own (else SECRET_KEY is kept by whoever set it)
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.db import DatabaseError, connection
from django.db.migrations.loader import MigrationLoader

from billing.audit import check_books
from console import supervision
from console.backup import database, trees
from console.schema import taking_turns
from storage.trees import remove_tree

FORMAT = 1
DATABASE, MANIFEST, KEY = "database.dump", "manifest.json", "secret_key"
MARK = ".restore-unfinished"
FRESH, BEFORE, TRASH = ".restore-new", ".restore-before", ".restore-trash"
Say = Callable[[str], None]


class BackupRefused(Exception):
    """Nothing was changed; the text says why and what to do."""


class DamagedBackup(BackupRefused):
    """The backup is not what its manifest says."""


class NewerBackup(BackupRefused):
    """The backup was made by a version that this one does not know."""


class NotEmpty(BackupRefused):
    """There is something here that the restore would replace."""


class RestoreBroken(Exception):
    """The restore began and did not end: the console stays shut until it is run again."""


def take(destination: Path, *, say: Say = lambda _text: None) -> dict[str, Any]:
    """Make a backup in the new folder `destination`, while the console runs or not. Gives its manifest.

    Raises BackupRefused, DatabaseToolFailed, OSError; `destination` is there only when all went well.
    """
    destination = destination.absolute()
    if destination.exists():
        raise BackupRefused(f"{destination} is there already. Each backup gets a folder of its own: choose a new name.")
    if sentence := unfinished_restore():
        raise BackupRefused(sentence)
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        with _running_database():
            _write(partial, say)
        _settle(partial)
        partial.rename(destination)
        _settle(destination.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return read_manifest(destination)


def read_manifest(source: Path) -> dict[str, Any]:
    """What the backup says of itself. Raises DamagedBackup, NewerBackup."""
    try:
        manifest = json.loads((source / MANIFEST).read_bytes())
        made_as, parts = manifest["format"], manifest["parts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedBackup(f"{source} is no backup, or an unfinished one: {MANIFEST} cannot be read.") from error
    if made_as > FORMAT:
        raise NewerBackup(f"This backup was made by Trainyard {manifest.get('version')}. Upgrade this console first.")
    if not {DATABASE, *(f"{name}.tar" for name in roots())} <= set(parts) | {"sandbox.tar"}:
        raise DamagedBackup(f"{source}: the manifest names no {DATABASE}, or not all files.")
    return dict(manifest)


def verify(source: Path) -> dict[str, Any]:
    """Read all of a backup, and compare it with its manifest, which it gives. Raises DamagedBackup, NewerBackup."""
    manifest = read_manifest(source)
    for name, part in manifest["parts"].items():
        path = source / name
        if Path(name).name != name or not path.is_file() or path.stat().st_size != part["bytes"]:
            raise DamagedBackup(f"{path} is missing, or not as long as it was.")
        with path.open("rb") as file:
            if not hmac.compare_digest(hashlib.file_digest(file, "sha256").hexdigest(), part["sha256"]):
                raise DamagedBackup(f"{path} is not what was written: its SHA-256 differs.")
    return manifest


def restore(source: Path, *, force: bool = False, say: Say = lambda _text: None) -> dict[str, Any]:
    """Put a backup in the place of this installation, which must be stopped, and empty or forced. Gives the manifest.

    Raises BackupRefused (and nothing was changed) or RestoreBroken (run it again, with force). Safe to repeat.
    """
    source = source.absolute()
    say("Reading the backup ...")
    manifest = verify(source)
    with _stopped_console(), database.one_snapshot():
        database.readable(source / DATABASE)
        _refuse_newer(manifest)
        _refuse_other_key(source, manifest, force=force)
        _refuse_full(force=force)
        if busy := database.others():
            raise BackupRefused(
                f"The database is in use ({', '.join(sorted(set(busy))[:5])}). Stop every process of the console first."
            )
        _unpack(source, manifest, say)
        _replace(source, manifest, say)
    return manifest


def unfinished_restore() -> str:
    """A sentence for whoever wants to start a console that is half of one and half of another; else empty."""
    marks = [root / MARK for root in roots().values() if (root / MARK).exists()]
    if not marks:
        return ""
    return (
        f"A restore was broken off ({marks[0]}). Run 'manage.py restore SRC --force' to its end before anything else."
    )


def roots() -> dict[str, Path]:
    """The folders that belong to an installation, by the name of their part."""
    found = {"storage": settings.TRAINYARD_STORAGE_ROOT, "runs": settings.TRAINYARD_RUNS_ROOT}
    return found | ({"sandbox": settings.VAR_DIR / "sandbox"} if settings.PAYMENTS_SANDBOX else {})


# --- Taking -----------------------------------------------------------------------------------------------------------


def _write(folder: Path, say: Say) -> None:
    parts: dict[str, Any] = {}
    say("The database ...")
    # No change of the schema in the middle: the dump and the list of migrations belong together.
    with taking_turns():
        database.dump(folder / DATABASE)
        migrations = _applied()
        server = database.server_version()
    with (folder / DATABASE).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    parts[DATABASE] = {"bytes": (folder / DATABASE).stat().st_size, "sha256": digest}
    for name, root in roots().items():
        say(f"{root} ...")
        packed = trees.pack(root, folder / f"{name}.tar")
        parts[f"{name}.tar"] = asdict(packed)
    own_key = settings.VAR_DIR / KEY
    if own_key.exists() and own_key.read_text().strip() == settings.SECRET_KEY:
        shutil.copyfile(own_key, folder / KEY)
        (folder / KEY).chmod(0o600)
        data = own_key.read_bytes()
        parts[KEY] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {
        "format": FORMAT,
        "version": _version(),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "postgresql": server,
        "migrations": migrations,
        "key": _fingerprint(settings.SECRET_KEY),
        "parts": parts,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _applied() -> list[str]:
    return sorted(f"{app}.{name}" for app, name in MigrationLoader(connection).applied_migrations)


def _version() -> str:
    try:
        return version("trainyard")
    except PackageNotFoundError:
        return "unknown"


def _fingerprint(key: str) -> str:
    """Tells two keys apart and says nothing of either."""
    return hmac.new(key.encode(), b"trainyard backup", "sha256").hexdigest()[:16]


# --- Putting back -----------------------------------------------------------------------------------------------------


def _refuse_newer(manifest: dict[str, Any]) -> None:
    known = {f"{app}.{name}" for app, name in MigrationLoader(None).disk_migrations}
    if newer := sorted(set(manifest["migrations"]) - known):
        raise NewerBackup(
            f"This backup is of Trainyard {manifest['version']}, which is newer than this console ({newer[0]} is not "
            "known here). Upgrade this console first."
        )


def _refuse_other_key(source: Path, manifest: dict[str, Any], *, force: bool) -> None:
    brings_key = KEY in manifest["parts"] and _keeps_own_key()
    if manifest["key"] == _fingerprint(settings.SECRET_KEY) or brings_key or force:
        return
    raise BackupRefused(
        f"SECRET_KEY is another than when {source.name} was made: stored registry passwords could not be read. Set it "
        "to that of the backup, or use --force and have the passwords entered anew."
    )


def _refuse_full(*, force: bool) -> None:
    if force:
        return
    if not database.is_empty():
        raise NotEmpty("There are accounts in this database. --force replaces all of them by the backup's.")
    for root in roots().values():
        if any(True for path in (root.iterdir() if root.exists() else ()) if not _is_bare(path)):
            raise NotEmpty(f"There are files in {root}. --force replaces all of them by the backup's.")


def _is_bare(path: Path) -> bool:
    """Hidden, or a folder of ours with nothing in it."""
    return path.name.startswith(".") or (path.is_dir() and not any(path.iterdir()))


def _unpack(source: Path, manifest: dict[str, Any], say: Say) -> None:
    """The files, beside what is there: nothing that counts is changed yet."""
    for name, root in roots().items():
        say(f"{root} ...")
        root.mkdir(parents=True, exist_ok=True)
        _clear(root, FRESH)
        (root / FRESH).mkdir(mode=0o700)
        if f"{name}.tar" not in manifest["parts"]:
            continue
        try:
            files = trees.unpack(source / f"{name}.tar", root / FRESH)
        except (trees.BrokenTree, tarfile.TarError) as error:
            raise DamagedBackup(str(error)) from error
        if files != manifest["parts"][f"{name}.tar"]["files"]:
            raise DamagedBackup(f"{name}.tar held {files} files, and its manifest says another number.")
    os.sync()


def _replace(source: Path, manifest: dict[str, Any], say: Say) -> None:
    """The database in one step, then the files. From the first to the last the console stays shut."""
    marks = [root / MARK for root in roots().values()]
    new = [mark for mark in marks if not mark.exists()]
    for mark in marks:
        mark.touch()
        _settle(mark.parent)
    say("The database ...")
    connection.close()
    try:
        try:
            database.replace(source / DATABASE)
        except database.DatabaseToolFailed as error:
            for mark in new:
                mark.unlink()
            raise BackupRefused(f"{error}\nNothing was changed.") from error
        for root in roots().values():
            _swap(root)
        if KEY in manifest["parts"] and _keeps_own_key():
            _take_over_key(source / KEY)
        call_command("migrate", interactive=False, verbosity=0)
        if wrong := [f"{count} {what}" for what, count in check_books().items() if count]:
            raise RestoreBroken("The books of this backup do not balance: " + ", ".join(wrong))
        for mark in marks:
            mark.unlink()
    except (database.DatabaseUnknown, DatabaseError, OSError) as error:
        raise RestoreBroken(f"{error}\nThe restore is unfinished. Put right what it says, and run it again.") from error
    for root in roots().values():
        for name in (BEFORE, TRASH):
            _clear(root, name)


def _swap(root: Path) -> None:
    """Move what is in `root` aside and the new in its place, entry by entry: the root itself may be a mount."""
    (root / BEFORE).mkdir(mode=0o700, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=root / BEFORE))
    for path in list(root.iterdir()):
        if path.name not in {MARK, FRESH, BEFORE, TRASH}:
            path.rename(aside / path.name)
    for path in list((root / FRESH).iterdir()):
        path.rename(root / path.name)
    (root / FRESH).rmdir()
    _settle(root)


def _clear(root: Path, name: str) -> None:
    """Remove one of our hidden folders, however deep and read-only what is in it."""
    if (root / name).exists():
        (root / TRASH).mkdir(mode=0o700, exist_ok=True)
        remove_tree(folder=root / name, scratch=root / TRASH) if name != TRASH else shutil.rmtree(root / TRASH)


def _keeps_own_key() -> bool:
    """Whether this installation made its key itself."""
    own = settings.VAR_DIR / KEY
    return own.exists() and own.read_text().strip() == settings.SECRET_KEY


def _take_over_key(path: Path) -> None:
    fresh = settings.VAR_DIR / f"{KEY}.restored"
    fresh.touch(mode=0o600)
    fresh.write_bytes(path.read_bytes())
    fresh.replace(settings.VAR_DIR / KEY)


@contextmanager
def _running_database() -> Iterator[None]:
    """The database up: as it is, or, where it is an embedded one that is down, for as long as this takes."""
    if not settings.EMBEDDED_DATABASE or settings.EMBEDDED.processes():
        yield
        return
    with _stopped_console():
        yield


@contextmanager
def _stopped_console() -> Iterator[None]:
    """Nobody's `up` runs here, and an embedded database does. It is left as it was found."""
    if not settings.EMBEDDED_DATABASE:
        yield
        return
    try:
        with supervision.only_one():
            was_down = not settings.EMBEDDED.processes()
            settings.EMBEDDED.start(database=True, broker=False)
            try:
                yield
            finally:
                connection.close()
                if was_down:
                    settings.EMBEDDED.stop()
    except supervision.AlreadyUp as running:
        raise BackupRefused(f"{running} Stop it first.") from running


def _settle(folder: Path) -> None:
    """Have the disk keep the folder's names, and its files' bytes, whatever happens next."""
    for path in [*(path for path in folder.iterdir() if path.is_file() and not path.is_symlink()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            with suppress(PermissionError):
                os.fsync(handle)
        finally:
            os.close(handle)
