"""The restore drill: a console that has sold and run training, backed up while it works, restored to an empty folder.

What must hold afterwards: the books balance and say the same, every file is the same, customers log in with the tokens
they have, and a run that was going on during the backup is retried free of charge.
"""

import hashlib

import pytest
from rich.console import Console as Screen

from jobs.demo import Customer
from tests.books import BROKEN_BOOKS
from tests.console.processes import wait_for
from tests.flows import WHOLE_CONSOLE
from tests.flows.console import Buyer, Console

pytestmark = [*WHOLE_CONSOLE, pytest.mark.slow]
TABLES = (
    "accounts_user", "accounts_membership", "accounts_apitoken", "billing_account", "billing_transaction",
    "billing_entry", "billing_receipt", "billing_quote", "storage_datasetversion", "storage_workspace", "jobs_order",
)  # fmt: skip


class Returning(Buyer):
    """A customer from before the restore, with the same token."""

    def __init__(self, console, token):
        Customer.__init__(self, console.url, token, Screen(quiet=True))


def rows(console):
    """Rows that no restart changes."""
    return {table: console.query(f"SELECT t::text FROM {table} AS t ORDER BY 1") for table in TABLES}


def broken_books(console):
    # psycopg takes a single % for a placeholder.
    return [name for name, sql in BROKEN_BOOKS.items() if console.query(sql.replace("%", "%%"))]


def files(root):
    """Return the hash of each file of a tree, by its path."""
    paths = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_a_console_comes_back_from_its_backup(console, buyer, console_images, tmp_path, short_folders):
    backup = tmp_path / "backup"
    buyer.call("PUT", "workspaces/main/files/data/日志.txt", content="数据".encode())
    ended = buyer.start("ended", code_path="quick.py", nodes=1)
    assert buyer.ended(ended)["state"] == "succeeded"
    running = buyer.start("kept", nodes=1)
    buyer.running(running)
    done = console.manage("backup", str(backup))
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr  # which would name a file that could not be packed
    bill, log = buyer.bill(ended), buyer.log(ended)
    saved_rows, saved_files = rows(console), files(console.var / "storage" / "workspaces")
    buyer.call("POST", f"jobs/{running}/cancel/")
    buyer.ended(running)

    second = Console(short_folders(), console_images, **console.settings)
    done = second.manage("restore", str(backup))
    assert done.returncode == 0, done.stderr
    assert "the books balance" in done.stdout
    assert files(second.var / "storage" / "workspaces") == saved_files
    second.embedded.start(database=True, broker=False)  # alone, so that no process changes the rows
    assert rows(second) == saved_rows
    assert broken_books(second) == []
    try:
        second.up()
        customer = Returning(second, buyer.token)
        assert customer.bill(ended) == bill
        assert customer.log(ended) == log
        # The run's processes belong to the first console. To the second one its node is lost, so it is retried, free.
        tried = customer.until(running, lambda data: len(data["attempts"]) == 2 and data["state"] == "running")
        assert tried["finished_at"] is None
        second.release("kept")
        assert customer.ended(running)["state"] == "succeeded"
        assert broken_books(second) == []
        customer.close()
        second.process.kill()
        second.process.wait()
        wait_for(lambda: not second.programs(), 60)  # the programs of a killed `up` end with it
    finally:
        second.remove()
