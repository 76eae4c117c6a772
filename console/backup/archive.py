"""Back up and restore an installation. A backup is a folder with the database, the files and a manifest.

The database is dumped before the files are copied. Deleted files are kept for days (`storage.retention`), so files that
the dump names still exist when they are copied. Only files that a customer removes for good meanwhile can be missing.
Files that were written after the dump are copied too; after a restore, garbage collection removes them.

A backup has these files, its parts:

    manifest.json    format, version, and the SHA-256 of every other part
    database.dump    the database, in pg_dump's custom format
    storage.tar      datasets, models and workspaces
    runs.tar         logs and results of runs
    sandbox.tar      the state of the payments sandbox, if it is used
    secret_key       if this installation generated its own; otherwise the operator keeps SECRET_KEY
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
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.db import DatabaseError, connection
from django.db.migrations.loader import MigrationLoader

from billing.reconciliation import check_ledger
from console import __version__
from console.backup import database, trees
from console.core.errors import CustomerError
from console.supervision import supervisor
from console.supervision.schema import schema_lock
from storage.trees import remove_tree

FORMAT = 1
"""The version of the layout above. A restore refuses a backup with a higher number."""
DATABASE_FILE, MANIFEST_FILE, KEY_FILE = "database.dump", "manifest.json", "secret_key"
UNFINISHED_MARKER = ".restore-unfinished"
"""A file that is in each root while a restore replaces data. The console does not start while one exists. A root is a
folder that the backup packs: see `roots`."""
NEW, REPLACED, TRASH = ".restore-new", ".restore-before", ".restore-trash"
"""Hidden folders that a restore makes in each root: for the unpacked backup, for the entries that it replaces, and for
trees that are being removed. They are in the root, because a rename cannot move an entry to another file system.
`trees.pack` leaves them out."""
ReportProgress = Callable[[str], None]
"""Called with each line of progress."""


class BackupRefused(Exception):
    """The backup or restore was refused before any change; the message says why and what to do."""


class DamagedBackup(BackupRefused):
    """The backup differs from its manifest."""


class NewerBackup(BackupRefused):
    """A newer version of Trainyard made the backup."""


class NotEmpty(BackupRefused):
    """The restore would replace existing data."""


class RestoreBroken(Exception):
    """The restore failed after its first change. The console does not start until a restore succeeds."""


def create(destination: Path, *, report: ReportProgress = lambda _text: None) -> dict[str, Any]:
    """Make a backup in the new folder `destination` and return its manifest. The console may be running.

    Raises BackupRefused, DatabaseToolFailed, OSError; `destination` exists only after success.
    """
    destination = destination.absolute()
    if destination.exists():
        raise BackupRefused(f"{destination} already exists. Each backup gets a folder of its own: choose a new name.")
    if message := unfinished_restore():
        raise BackupRefused(message)
    destination.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder as the destination, so that one rename completes the backup.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        with _running_database():
            _write_parts(unfinished, report)
        _sync_folder(unfinished)
        unfinished.rename(destination)
        _sync_folder(destination.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # after success it no longer exists
    return read_manifest(destination)


def read_manifest(source: Path) -> dict[str, Any]:
    """Return the manifest of a backup. Raises DamagedBackup, NewerBackup."""
    try:
        manifest = json.loads((source / MANIFEST_FILE).read_bytes())
        backup_format, parts = manifest["format"], manifest["parts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedBackup(f"{source} is no backup, or an unfinished one: {MANIFEST_FILE} cannot be read.") from error
    if backup_format > FORMAT:
        raise NewerBackup(f"This backup was made by Trainyard {manifest.get('version')}. Upgrade this console first.")
    # sandbox.tar may be missing: the backup may be of a console with Stripe, and this console uses the sandbox.
    required_parts = {DATABASE_FILE, *(f"{name}.tar" for name in roots())} - {"sandbox.tar"}
    if not required_parts <= set(parts):
        raise DamagedBackup(f"{source}: the manifest lacks {DATABASE_FILE} or another part.")
    return dict(manifest)


def verify(source: Path) -> dict[str, Any]:
    """Compare every file of a backup with its manifest; return the manifest. Raises DamagedBackup, NewerBackup."""
    manifest = read_manifest(source)
    for name, part in manifest["parts"].items():
        path = source / name
        # A name with a slash could lead out of the backup's folder.
        if Path(name).name != name or not path.is_file() or path.stat().st_size != part["bytes"]:
            raise DamagedBackup(f"{path} is missing, or has another size than in the manifest.")
        if _size_and_digest(path)["sha256"] != part["sha256"]:
            raise DamagedBackup(f"{path} is damaged: its SHA-256 differs from the manifest.")
    return manifest


def restore(source: Path, *, force: bool = False, report: ReportProgress = lambda _text: None) -> dict[str, Any]:
    """Replace this installation by a backup, and return the manifest.

    The installation must be stopped. Without `force` it must also be empty and have the backup's SECRET_KEY.
    Raises BackupRefused before any change, or RestoreBroken after it: the restore must then be repeated with `force`.
    """
    source = source.absolute()
    report("Reading the backup ...")
    manifest = verify(source)
    # `fresh_connection`: a connection from before may be broken, and none may remain when the database is stopped.
    with _while_console_is_stopped(), database.fresh_connection():
        # Check everything before the first change.
        database.check_readable(source / DATABASE_FILE)
        _refuse_newer(manifest)
        _refuse_other_key(source, manifest, force=force)
        _refuse_existing_data(force=force)
        if programs := database.other_programs():
            raise BackupRefused(
                f"The database is in use ({', '.join(programs[:5])}). Stop every process of the console first."
            )
        _unpack_files(source, manifest, report)
        _replace_data(source, manifest, report)
    return manifest


def unfinished_restore() -> str:
    """Return a sentence that tells the operator to repeat an interrupted restore; empty if there is none."""
    markers = [root / UNFINISHED_MARKER for root in roots().values() if (root / UNFINISHED_MARKER).exists()]
    if not markers:
        return ""
    return f"A restore was interrupted ({markers[0]}). Complete it with 'manage.py restore SRC --force' first."


def roots() -> dict[str, Path]:
    """Return the folders that a backup packs. The part of the root `runs`, for example, is `runs.tar`."""
    folders = {"storage": settings.TRAINYARD_STORAGE_ROOT, "runs": settings.TRAINYARD_RUNS_ROOT}
    if settings.PAYMENTS_SANDBOX:
        folders["sandbox"] = settings.VAR_DIR / "sandbox"
    return folders


# --- Backup -----------------------------------------------------------------------------------------------------------


def _write_parts(folder: Path, report: ReportProgress) -> None:
    """Write all parts of a backup, and the manifest last."""
    parts: dict[str, Any] = {}
    report("The database ...")
    # No migration runs while this process holds the lock, so the list of applied migrations matches the dump.
    with schema_lock():
        database.dump(folder / DATABASE_FILE)
        migrations = _applied_migrations()
        server = database.server_version()
    parts[DATABASE_FILE] = _size_and_digest(folder / DATABASE_FILE)
    for name, root in roots().items():
        report(f"{root} ...")
        parts[f"{name}.tar"] = asdict(trees.pack(root, folder / f"{name}.tar"))
    # A SECRET_KEY from the environment is not copied, because its operator keeps it elsewhere.
    if _has_generated_key():
        shutil.copyfile(settings.VAR_DIR / KEY_FILE, folder / KEY_FILE)
        (folder / KEY_FILE).chmod(0o600)
        parts[KEY_FILE] = _size_and_digest(folder / KEY_FILE)
    manifest = {
        "format": FORMAT,
        "version": __version__,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "postgresql": server,
        "migrations": migrations,
        "key": _fingerprint(settings.SECRET_KEY),
        "parts": parts,
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1))


def _size_and_digest(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file, as the manifest has them."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _applied_migrations() -> list[str]:
    """Return the applied migrations as `app.name`."""
    return sorted(f"{app}.{name}" for app, name in MigrationLoader(connection).applied_migrations)


def _fingerprint(key: str) -> str:
    """Return a fingerprint, by which a restore recognizes the key. The key cannot be computed from it."""
    return hmac.new(key.encode(), b"trainyard backup", "sha256").hexdigest()[:16]  # 64 bits, enough to tell keys apart


# --- Restore ----------------------------------------------------------------------------------------------------------


def _refuse_newer(manifest: dict[str, Any]) -> None:
    """Raise NewerBackup if the dump has migrations that this version of the console does not know."""
    known_migrations = {f"{app}.{name}" for app, name in MigrationLoader(None).disk_migrations}
    if newer := sorted(set(manifest["migrations"]) - known_migrations):
        raise NewerBackup(
            f"This backup is of Trainyard {manifest['version']}, which is newer than this console ({newer[0]} is not "
            "known here). Upgrade this console first."
        )


def _refuse_other_key(source: Path, manifest: dict[str, Any], *, force: bool) -> None:
    """Raise BackupRefused if the restored installation could not decrypt the backup's secrets."""
    # `_replace_data` replaces a generated key by the backup's key, but cannot change a SECRET_KEY of the environment.
    will_replace_key = KEY_FILE in manifest["parts"] and _has_generated_key()
    if manifest["key"] == _fingerprint(settings.SECRET_KEY) or will_replace_key or force:
        return
    raise BackupRefused(
        f"SECRET_KEY differs from that of {source.name}, so stored registry passwords could not be decrypted. Set the "
        "backup's SECRET_KEY, or use --force and enter the passwords again."
    )


def _refuse_existing_data(*, force: bool) -> None:
    """Raise NotEmpty if the restore would replace accounts or files."""
    if force:
        return
    if not database.is_empty():
        raise NotEmpty("This database has accounts. --force replaces all of them by the backup's.")
    for root in roots().values():
        if root.exists() and not all(_is_hidden_or_empty(path) for path in root.iterdir()):
            raise NotEmpty(f"There are files in {root}. --force replaces all of them by the backup's.")


def _is_hidden_or_empty(path: Path) -> bool:
    """Return whether a path is an empty folder or hidden, which a new installation may have.

    The hidden folder of the outputs of jobs (PACKED_HIDDEN_NAMES) counts only if it is empty.
    """
    is_hidden = path.name.startswith(".") and path.name not in trees.PACKED_HIDDEN_NAMES
    return is_hidden or (path.is_dir() and not any(path.iterdir()))


def _unpack_files(source: Path, manifest: dict[str, Any], report: ReportProgress) -> None:
    """Unpack the files into NEW, and leave the existing files as they are. Raises DamagedBackup."""
    for name, root in roots().items():
        report(f"{root} ...")
        root.mkdir(parents=True, exist_ok=True)
        _remove_hidden(root, NEW)
        (root / NEW).mkdir(mode=0o700)
        if f"{name}.tar" not in manifest["parts"]:  # sandbox.tar may be missing: see `read_manifest`
            continue
        try:
            files = trees.unpack(source / f"{name}.tar", root / NEW)
        except (trees.BrokenTree, tarfile.TarError) as error:
            raise DamagedBackup(str(error)) from error
        if files != manifest["parts"][f"{name}.tar"]["files"]:
            raise DamagedBackup(f"{name}.tar has {files} files, but the manifest names another number.")
    os.sync()  # else a crash of the machine could leave a database that names files that are not on the disk


def _replace_data(source: Path, manifest: dict[str, Any], report: ReportProgress) -> None:
    """Replace the database in one transaction, then the files. Markers keep the console from starting meanwhile.

    Raises BackupRefused if the database could not be replaced and nothing was changed, or RestoreBroken.
    """
    markers = [root / UNFINISHED_MARKER for root in roots().values()]
    # If this restore fails without a change, it removes only the markers that it made. Those of an earlier, interrupted
    # restore stay.
    own_markers = [marker for marker in markers if not marker.exists()]
    for marker in markers:
        marker.touch()
        _sync_folder(marker.parent)  # the marker must be on the disk before the database changes
    report("The database ...")
    connection.close()  # this process's session must have no lock on the old tables and no cached data about them
    try:
        try:
            database.replace(source / DATABASE_FILE)
        except database.DatabaseToolFailed as error:  # the transaction was rolled back
            for marker in own_markers:
                marker.unlink()
            raise BackupRefused(f"{error}\nNothing was changed.") from error
        for root in roots().values():
            _swap_entries(root)
        if KEY_FILE in manifest["parts"] and _has_generated_key():
            _replace_key(source / KEY_FILE)
        call_command("migrate", interactive=False, verbosity=0)  # the backup may be of an older version
        if findings := [f"{count} {finding}" for finding, count in check_ledger().items() if count]:
            raise RestoreBroken("The books of this backup do not balance: " + ", ".join(findings))
        for marker in markers:
            marker.unlink()
    except (database.DatabaseStateUnknown, DatabaseError, OSError) as error:
        raise RestoreBroken(
            f"{error}\nThe restore is incomplete. Fix this problem and run the restore again."
        ) from error
    for root in roots().values():
        for name in (REPLACED, TRASH):
            try:
                _remove_hidden(root, name)
            except (OSError, CustomerError) as error:
                # Runs continue, and may still write into the replaced folder. `remove_tree` then raises one of these.
                report(f"{root / name} could not be removed: {error}. The next restore removes it.")


def _swap_entries(root: Path) -> None:
    """Move the entries of `root` into REPLACED, and the entries of NEW into `root`.

    `root` itself is not renamed, because it may be a mount point.
    """
    (root / REPLACED).mkdir(mode=0o700, exist_ok=True)
    # A new folder each time, because a repeated restore moves entries with the same names into REPLACED again.
    replaced_folder = Path(tempfile.mkdtemp(dir=root / REPLACED))
    for path in list(root.iterdir()):
        if path.name not in {UNFINISHED_MARKER, NEW, REPLACED, TRASH}:
            path.rename(replaced_folder / path.name)
    for path in list((root / NEW).iterdir()):
        path.rename(root / path.name)
    (root / NEW).rmdir()
    _sync_folder(root)


def _remove_hidden(root: Path, name: str) -> None:
    """Remove the folder NEW, REPLACED or TRASH of `root`, if it exists.

    `remove_tree` can remove deep and read-only trees, as customers' code may write them, and uses TRASH for this.
    """
    if not (root / name).exists():
        return
    if name == TRASH:
        shutil.rmtree(root / TRASH)
    else:
        (root / TRASH).mkdir(mode=0o700, exist_ok=True)
        remove_tree(folder=root / name, scratch=root / TRASH)


def _has_generated_key() -> bool:
    """Return whether this installation uses a SECRET_KEY that it generated itself."""
    generated = settings.VAR_DIR / KEY_FILE
    return bool(generated.exists() and generated.read_text().strip() == settings.SECRET_KEY)


def _replace_key(path: Path) -> None:
    """Replace this installation's key file by the backup's, by a rename. At no time can other users read it."""
    restored = settings.VAR_DIR / f"{KEY_FILE}.restored"
    restored.touch(mode=0o600)
    restored.write_bytes(path.read_bytes())
    restored.replace(settings.VAR_DIR / KEY_FILE)


@contextmanager
def _running_database() -> Iterator[None]:
    """Start the embedded database for the block if it is stopped. Any other database is the operator's matter."""
    if not settings.EMBEDDED_DATABASE or settings.EMBEDDED.processes():  # another server, or it runs already
        yield
        return
    with _while_console_is_stopped():
        yield


@contextmanager
def _while_console_is_stopped() -> Iterator[None]:
    """Hold the lock of `up`, so that no console starts during the block. Raises BackupRefused if `up` runs.

    The embedded database is started for the block. It is stopped afterwards, unless it ran before. Without an embedded
    database this does nothing: the operator must stop the console.
    """
    if not settings.EMBEDDED_DATABASE:
        yield
        return
    try:
        with supervisor.up_lock():
            was_stopped = not settings.EMBEDDED.processes()
            settings.EMBEDDED.start(database=True, broker=False)
            try:
                yield
            finally:
                connection.close()
                if was_stopped:
                    settings.EMBEDDED.stop()
    except supervisor.AlreadyRunning as error:
        raise BackupRefused(f"{error} Stop it first.") from error


def _sync_folder(folder: Path) -> None:
    """Write a folder and the files directly in it to the disk (fsync)."""
    for path in [*(path for path in folder.iterdir() if path.is_file() and not path.is_symlink()), folder]:
        file_fd = os.open(path, os.O_RDONLY)
        try:
            with suppress(PermissionError):  # not every file system allows it for folders
                os.fsync(file_fd)
        finally:
            os.close(file_fd)
