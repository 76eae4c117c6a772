"""A real Slurm on this machine: munged, slurmctld and several slurmd on free ports, with a key of their own."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scancel", "scontrol")
_START_SECONDS = 60.0
"""How long daemons and nodes may take to be ready."""
END_SECONDS = 20.0
"""How long a daemon may take to end."""
_CPUS = 2
"""Cores that each node claims to have; this machine may have more or fewer. A node of a run takes both, so that no two
nodes of a run share a machine."""


def missing_program(programs: Iterable[str] = PROGRAMS) -> str:
    """Return the first of these programs that this machine lacks; "" if it has them all."""
    search_path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return next((name for name in programs if shutil.which(name, path=search_path) is None), "")


class SlurmCluster:
    """A Slurm of `nodes` nodes, named n0, n1 and so on, that runs until `close`. `conf` is its configuration file.

    `folder` is empty, and its path is short, because munged's socket is in it and the kernel limits a socket's path.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self._folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.conf = self._folder / "slurm.conf"
        self._environment = {
            **os.environ,
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
            "SLURM_CONF": str(self.conf),
        }
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        munge = self._start_munge()
        self.conf.write_text("\n".join([*self._settings(munge), ""]))
        self._start_accounting(munge)
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        self._run("slurmctld", "-D", "-i")  # in the foreground, and ignoring errors of earlier state
        for node in self.nodes:
            (self._folder / node).mkdir()
            self.start_node(node)
        self.wait_until(lambda: self._idle_nodes() == len(self.nodes), "the nodes")

    def _start_munge(self) -> Path:
        """Start munged with a key of its own, and return its folder."""
        munge = self._folder / "munge"
        munge.mkdir(mode=0o755)
        key = munge / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self._run(
            "munged",
            f"--socket={munge}/socket",
            f"--key-file={key}",
            f"--pid-file={munge}/munged.pid",
            f"--log-file={munge}/munged.log",
            f"--seed-file={munge}/munged.seed",
            "--foreground",
            "--force",
        )
        self.wait_until((munge / "socket").exists, "munged")
        return munge

    def _start_accounting(self, munge: Path) -> None:
        """Start the daemons of accounting: none here. `munge` is the folder of munged."""

    def _accounting_settings(self, _munge: Path) -> list[str]:
        """Return the lines of slurm.conf about accounting, and about how long the controller remembers jobs."""
        return ["AccountingStorageType=accounting_storage/none", "MinJobAge=300"]

    def _settings(self, munge: Path) -> list[str]:
        user = pwd.getpwuid(os.getuid()).pw_name
        controller_port, *node_ports = free_ports(1 + len(self.nodes))
        lines = [
            "ClusterName=tests",
            "SlurmctldHost=localhost(127.0.0.1)",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            f"AuthInfo=socket={munge}/socket",
            f"SlurmctldPort={controller_port}",
            f"SlurmctldPidFile={self._folder}/slurmctld.pid",
            f"SlurmctldLogFile={self._folder}/slurmctld.log",
            f"SlurmdPidFile={self._folder}/%n/slurmd.pid",
            f"SlurmdLogFile={self._folder}/%n/slurmd.log",
            f"SlurmdSpoolDir={self._folder}/%n",
            f"StateSaveLocation={self._folder}",
            "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
            "SlurmdParameters=config_overrides",  # use CPUs and RealMemory below in place of this machine's
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "SchedulerParameters=batch_sched_delay=0,sched_min_interval=0",  # start jobs at once
            "PreemptType=preempt/partition_prio",
            "PreemptMode=CANCEL",
            *self._accounting_settings(munge),
            "JobCompType=jobcomp/none",
            "DefMemPerCPU=128",
            "ReturnToService=1",
            # Short times, so that no test waits long.
            "SlurmdTimeout=10",
            "KillWait=5",
            "MessageTimeout=10",
        ]
        lines += [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS} RealMemory=4096 "
            "State=UNKNOWN"
            for node, port in zip(self.nodes, node_ports, strict=True)
        ]
        everything = ",".join(self.nodes)
        # Jobs of `urgent` preempt those of `main`.
        lines += [
            f"PartitionName=main Nodes={everything} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=5",
            f"PartitionName=urgent Nodes={everything} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF",
        ]
        return lines

    def _run(self, program: str, *arguments: str, name: str = "") -> None:
        path = shutil.which(program, path=self._environment["PATH"])
        assert path is not None
        log = (self._folder / f"{name or program}.out").open("ab")
        with log:
            self._daemons[name or program] = subprocess.Popen(
                [path, *arguments], env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._run("slurmd", "-D", "-N", node, name=f"slurmd-{node}")

    def call(self, program: str, *arguments: str) -> str:
        """Run a command of Slurm and return what it prints."""
        done = subprocess.run(
            [program, *arguments], env=self._environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def lose(self, node: str) -> None:
        """Have the controller consider a node as failed: it ends what runs there."""
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def recover(self) -> None:
        """Return every node to service."""
        for node in self.nodes:
            with contextlib.suppress(subprocess.CalledProcessError):  # it is in service
                self.call("scontrol", "update", f"nodename={node}", "state=resume")
        self.wait_until(lambda: self._idle_nodes() == len(self.nodes), "the nodes")

    def _idle_nodes(self) -> int:
        try:
            return self.call("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t").split().count("idle")
        except subprocess.CalledProcessError:
            return 0

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition holds; `what` names it in the error."""
        give_up_at = time.monotonic() + _START_SECONDS
        while not condition():
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"Slurm: {what} did not get ready.\n{self.logs()}")
            time.sleep(0.05)

    def logs(self) -> str:
        """Return the ends of all logs of the daemons."""
        paths = [*self._folder.glob("*.log"), *self._folder.glob("*.out"), *self._folder.glob("*/*.log")]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)

    def close(self) -> None:
        """End every daemon."""
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            try:
                daemon.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nothing uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
