"""The restore drill: a console that has sold and run training, backed up while it works, restored where nothing is.

What must hold afterwards: the books balance and say the same, every file is the same, customers log in with the tokens
they have, and what was running when the backup was made is not lost: it is tried again, free of charge.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as Screen

from jobs.demo import Customer
from tests.books import BROKEN_BOOKS
from tests.flows.console import ROOT, Buyer, Console, served

pytestmark = pytest.mark.flow
TABLES = (
    "accounts_user", "accounts_membership", "accounts_apitoken", "billing_account", "billing_transaction",
    "billing_entry", "billing_receipt", "billing_quote", "storage_datasetversion", "storage_workspace", "jobs_order",
)  # fmt: skip


class Returning(Buyer):
    """A customer who was there before the restore, with the token of then."""

    def __init__(self, console: Console, token: str) -> None:
        Customer.__init__(self, console.url, token, Screen(quiet=True))


def manage(console: Console, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", *words],
        cwd=ROOT, env=console.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def rows(console: Console) -> dict[str, list[tuple[Any, ...]]]:
    """What no restart changes."""
    return {table: console.query(f"SELECT t::text FROM {table} AS t ORDER BY 1") for table in TABLES}


def files(root: Path) -> dict[str, str]:
    """Every file of a tree, by what is in it."""
    found = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def test_a_console_comes_back_from_its_backup(
    console: Console, buyer: Buyer, bare_images: Path, tmp_path: Path
) -> None:
    backup = tmp_path / "backup"
    buyer.call("PUT", "workspaces/main/files/data/日志.txt", content="数据".encode())
    ended = buyer.start("ended", code_path="quick.py", nodes=1)
    assert buyer.ended(ended)["state"] == "succeeded"
    running = buyer.start("kept", nodes=1)
    buyer.running(running)
    done = manage(console, "backup", str(backup))
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr
    bill, log = buyer.bill(ended), buyer.log(ended)
    kept, stored = rows(console), files(console.var / "storage" / "workspaces")
    buyer.call("POST", f"jobs/{running}/cancel/")
    buyer.ended(running)

    second = Console(Path(tempfile.mkdtemp(prefix="ty-")), bare_images, LOCAL_CPUS="2", LOCAL_MEMORY_MIB="8192")
    done = manage(second, "restore", str(backup))
    assert done.returncode == 0, done.stderr
    assert "the books balance" in done.stdout
    assert files(second.var / "storage" / "workspaces") == stored
    second.embedded.start(database=True, broker=False)
    assert rows(second) == kept
    assert {name: wrong for name, sql in BROKEN_BOOKS.items() if (wrong := second.query(sql.replace("%", "%%")))} == {}
    for _console in served(second):
        again = Returning(second, buyer.token)
        assert again.bill(ended) == bill
        assert again.log(ended) == log
        # Its processes were the other machine's: a lost node, which costs nothing, and another attempt.
        tried = again.until(running, lambda data: len(data["attempts"]) == 2 and data["state"] == "running")
        assert tried["finished_at"] is None
        second.release("kept")
        assert again.ended(running)["state"] == "succeeded"
        assert {
            name: wrong for name, sql in BROKEN_BOOKS.items() if (wrong := second.query(sql.replace("%", "%%")))
        } == {}
        again.http.close()
