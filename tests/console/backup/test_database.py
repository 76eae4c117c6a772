"""What a restore does with the tools of PostgreSQL, and whom it finds connected to the database."""

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection

from console.backup import archive, database

MANY_ERRORS = 200_000
"""Bytes of error output: more than a pipe holds, 64 KiB."""


@pytest.mark.timeout(60)
def test_a_restore_does_not_wait_for_a_tool_with_many_errors(tmp_path, monkeypatch):
    """If nobody read the errors of pg_restore, it would wait for ever, and the restore for its SQL."""
    commands = {
        "pg_restore": f"head -c {MANY_ERRORS} /dev/zero | tr '\\0' 'x' >&2; echo 'no such table' >&2; exit 1",
        "psql": "cat > /dev/null",
    }
    for name, command in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(database, "_find_tool", lambda name: tmp_path / name)
    monkeypatch.setattr(database, "server_version", lambda: 18)  # else it asks the database, which this test lacks
    with pytest.raises(database.DatabaseToolFailed, match="no such table"):
        database.replace(tmp_path / "dump")


@pytest.mark.parametrize(("status", "version"), [(127, ""), (0, "Usage")])
def test_a_tool_that_does_not_start_is_named_with_its_last_words(tmp_path, monkeypatch, status, version):
    (tmp_path / "pg_dump").write_text(f"#!/bin/sh\necho {version}; echo 'libpq.so.5: not found' >&2; exit {status}\n")
    (tmp_path / "pg_dump").chmod(0o755)
    monkeypatch.setattr(database, "find_spec", lambda _name: None)  # the embedded PostgreSQL's tools
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(database, "server_version", lambda: 18)
    with pytest.raises(database.DatabaseToolFailed, match=rf"{tmp_path}/pg_dump failed:\nlibpq.so.5: not found"):
        database.dump(tmp_path / "dump")
    (tmp_path / "pg_dump").write_bytes(b"no program")
    with pytest.raises(database.DatabaseToolFailed, match=rf"{tmp_path}/pg_dump failed:\n.*Exec format error"):
        database.dump(tmp_path / "dump")


def test_a_database_that_does_not_answer_is_no_traceback(tmp_path, monkeypatch):
    def refuse():
        raise OperationalError("Connection refused")

    monkeypatch.setattr(archive, "_running_database", refuse)
    with pytest.raises(CommandError, match="Connection refused"):
        call_command("backup", str(tmp_path / "backup"))
    assert not list(tmp_path.iterdir())


@pytest.mark.django_db
def test_a_program_on_another_machine_is_named_with_its_address():
    with connection.cursor() as cursor:
        # PostgreSQL finds this table before its view, whose rows have no addresses here: tests use a Unix socket.
        cursor.execute(
            "CREATE TEMPORARY TABLE pg_stat_activity ON COMMIT DROP AS SELECT 'a worker' AS application_name,"
            " inet '10.0.0.5' AS client_addr, current_database() AS datname, 0 AS pid,"
            " 'client backend' AS backend_type"
        )
    assert database.other_programs() == ["a worker at 10.0.0.5"]
