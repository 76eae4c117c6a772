"""A real Slurm with accounting on this machine: slurmdbd, and MariaDB for its data, on free ports."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
from pathlib import Path

from tests.slurm.cluster import END_SECONDS, PROGRAMS, SlurmCluster, free_ports

ACCOUNTING_PROGRAMS = (*PROGRAMS, "sacct", "sacctmgr", "slurmdbd", "mariadbd", "mariadb-install-db")
ACCOUNT, ORGANIZATION_ACCOUNT = "everybody", "acme-lab"
"""The accounts that the user of the tests may submit to."""
FOREIGN_ACCOUNT = "others"
"""An account that the user of the tests may not submit to, since no association joins them."""


class SlurmClusterWithAccounting(SlurmCluster):
    """A Slurm that refuses jobs whose user has no association with their account, and soon forgets ended jobs."""

    def _accounting_settings(self, munge: Path) -> list[str]:
        self._database_port, self._slurmdbd_port = free_ports(2)  # `_start_accounting` comes later and needs both
        return [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={self._slurmdbd_port}",
            f"AccountingStoragePass={munge}/socket",
            "AccountingStorageEnforce=associations,limits",
            # After this many seconds the controller may forget an ended job. It does so at intervals of at least 10 s.
            "MinJobAge=2",
        ]

    def _start_accounting(self, munge: Path) -> None:
        password = secrets.token_hex(16)
        self._start_database(password)
        self._configure_slurmdbd(munge, password)
        self.start_slurmdbd()
        user = pwd.getpwuid(os.getuid()).pw_name
        self.manage("add", "cluster", "tests")  # the `ClusterName` of slurm.conf
        self.manage("add", "account", ACCOUNT, ORGANIZATION_ACCOUNT, FOREIGN_ACCOUNT, "cluster=tests")
        self.manage("add", "user", user, f"account={ACCOUNT},{ORGANIZATION_ACCOUNT}", f"defaultaccount={ACCOUNT}")

    def _start_database(self, password: str) -> None:
        folder = self._folder / "mariadb"
        folder.mkdir()
        user = f"--user={pwd.getpwuid(os.getuid()).pw_name}"
        install = shutil.which("mariadb-install-db", path=self._environment["PATH"])
        assert install is not None
        subprocess.run(
            [install, "--no-defaults", user, f"--datadir={folder}", "--auth-root-authentication-method=normal",
             "--skip-test-db", "--skip-name-resolve"],
            env=self._environment, capture_output=True, timeout=120, check=True,
        )  # fmt: skip
        users = self._folder / "users.sql"
        users.touch(mode=0o600)
        users.write_text(
            f"CREATE DATABASE IF NOT EXISTS slurm;\n"
            f"GRANT ALL ON slurm.* TO 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        )
        self._run(
            "mariadbd", "--no-defaults", user, f"--datadir={folder}", f"--socket={self._folder}/mariadb.sock",
            "--bind-address=127.0.0.1", f"--port={self._database_port}", f"--pid-file={self._folder}/mariadb.pid",
            "--skip-name-resolve", f"--init-file={users}", "--innodb-buffer-pool-size=32M",
            "--innodb-flush-log-at-trx-commit=0",
        )  # fmt: skip
        self.wait_until((self._folder / "mariadb.sock").exists, "mariadbd")

    def _configure_slurmdbd(self, munge: Path, password: str) -> None:
        settings = [
            "AuthType=auth/munge",
            f"AuthInfo=socket={munge}/socket",
            "DbdHost=localhost",
            "DbdAddr=127.0.0.1",
            f"DbdPort={self._slurmdbd_port}",
            f"SlurmUser={pwd.getpwuid(os.getuid()).pw_name}",
            f"PidFile={self._folder}/slurmdbd.pid",
            f"LogFile={self._folder}/slurmdbd.log",
            "StorageType=accounting_storage/mysql",
            "StorageHost=127.0.0.1",
            f"StoragePort={self._database_port}",
            "StorageUser=slurm",
            f"StoragePass={password}",
            "StorageLoc=slurm",
        ]
        path = self._folder / "slurmdbd.conf"
        path.touch(mode=0o600)  # slurmdbd requires it, since the file has a password
        path.write_text("\n".join([*settings, ""]))

    def start_slurmdbd(self) -> None:
        """Start slurmdbd and wait until it answers."""
        self._run("slurmdbd", "-D")
        self.wait_until(self._has_accounting, "slurmdbd")

    def stop_slurmdbd(self) -> None:
        """End slurmdbd, so that Slurm has no accounting until `start_slurmdbd`."""
        self._daemons["slurmdbd"].terminate()
        self._daemons["slurmdbd"].wait(END_SECONDS)

    def _has_accounting(self) -> bool:
        try:
            self.call("sacctmgr", "--noheader", "list", "cluster")
        except subprocess.CalledProcessError:
            return False
        return True

    def manage(self, *arguments: str) -> None:
        """Change accounts and associations (`sacctmgr`)."""
        self.call("sacctmgr", "--immediate", *arguments)
