"""Run Slurm's command line tools, and cache the lists of jobs and machines for a moment."""

from __future__ import annotations

import asyncio
import os
import pwd
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from runtime.backends.slurm.config import SlurmConfig
from runtime.backends.slurm.states import (
    ACCOUNTING_FIELDS,
    JOB_FORMAT,
    Machine,
    SlurmJob,
    has_preemption_time,
    parse_jobs,
    parse_machines,
)
from runtime.errors import BackendUnavailable

_MAX_ERROR_LENGTH = 300
"""Maximum length of a reported error, in characters from its end: one or two lines, which people can read."""
INHERITED_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "LD_LIBRARY_PATH", "TZ")
"""Variables of this process that Slurm's tools inherit. sbatch passes them on to the batch script of a job."""


def shorten_error(text: str) -> str:
    """Return the end of a tool's error output as one line."""
    return " ".join(text.split())[-_MAX_ERROR_LENGTH:]


class CommandFailed(Exception):
    """A command of Slurm exited with an error. The exception's text is the command's error output."""


class Slurm:
    """The command line tools of one cluster, as the user of this process."""

    def __init__(self, config: SlurmConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        # Slurm's last answers, and when it gave them (monotonic); -inf: the next call asks Slurm.
        self._jobs: dict[str, SlurmJob] = {}
        self._jobs_read_at = float("-inf")
        self._machines: tuple[Machine, ...] = ()
        self._machines_read_at = float("-inf")

    def path(self, program: str) -> str:
        """Return a tool's path in the folder of the setting `bin`; without the setting, its name, for the PATH."""
        return str(Path(self._config.bin) / program) if self._config.bin else program

    def call(self, program: str, *arguments: str, stdin: str = "", seconds: float | None = None) -> str:
        """Run a tool and return its output. Raises CommandFailed, BackendUnavailable.

        `seconds` is the timeout; None: the setting `command_seconds`.
        """
        try:
            result = subprocess.run(
                [self.path(program), *arguments],
                env=self._environment(),
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds or self._config.command_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise BackendUnavailable(f"Slurm's {program} did not answer in {error.timeout:g} s.") from error
        except OSError as error:
            raise BackendUnavailable(f"Slurm's {program} cannot be started: {error.strerror}.") from error
        if result.returncode:
            raise CommandFailed(shorten_error(result.stderr))
        return result.stdout

    async def start(self, program: str, arguments: Sequence[str], *, stdio_fd: int) -> asyncio.subprocess.Process:
        """Start a tool whose stdin and stdout are a descriptor. Its stderr is a pipe for the caller to read.

        Raises BackendUnavailable.
        """
        try:
            return await asyncio.create_subprocess_exec(
                self.path(program),
                *arguments,
                env=self._environment(),
                stdin=stdio_fd,
                stdout=stdio_fd,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise BackendUnavailable(f"Slurm's {program} cannot be started: {error.strerror}.") from error

    def _environment(self) -> dict[str, str]:
        """Return the environment of the tools.

        Jobs inherit it, so it must not contain the console's secrets. Variables such as SBATCH_PARTITION are left out
        too, since they would change what the tools do.
        """
        environment = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        environment.update({"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"})
        if self._config.conf:
            environment["SLURM_CONF"] = self._config.conf
        return environment

    def _query(self, program: str, *arguments: str) -> str:
        """Run a tool that fails only if Slurm does not work; return its output. Raises BackendUnavailable."""
        try:
            return self.call(program, *arguments)
        except CommandFailed as error:
            raise BackendUnavailable(f"Slurm's {program} failed: {error}") from error

    def jobs(self, max_age_seconds: float) -> dict[str, SlurmJob]:
        """Return this user's jobs by id, from an answer at most `max_age_seconds` old. Raises BackendUnavailable.

        Slurm forgets a job some minutes after its end (MinJobAge).
        """
        with self._lock:
            if time.monotonic() - self._jobs_read_at > max_age_seconds:
                text = self._query("squeue", "--me", "--states=all", "--noheader", f"--format={JOB_FORMAT}")
                self._jobs, self._jobs_read_at = parse_jobs(text), time.monotonic()
            return self._jobs

    def active_jobs(self, job_name: str) -> list[str]:
        """Return the ids of this user's jobs of this name that have or may still get processes.

        Asks Slurm at each call. Raises BackendUnavailable.
        """
        text = self._query(
            "squeue", "--me", "--states=all", "--noheader", f"--name={job_name}", f"--format={JOB_FORMAT}"
        )
        return sorted(job.job_id for job in parse_jobs(text).values() if job.is_active)

    def known_jobs(self) -> dict[str, SlurmJob]:
        """Return the jobs of Slurm's last answer. Does not ask Slurm again, even if this answer is old."""
        return self._jobs

    def finished_job(self, job_id: str) -> SlurmJob | None:
        """Return an ended job that the controller has forgotten, from Slurm's accounting. Raises BackendUnavailable.

        None if the cluster has no accounting, or if accounting does not know how the job ended: the controller may have
        lost the job, for example with its disk, before it reported the end.
        """
        if not self._config.accounting:
            return None
        text = self._query(
            "sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}", f"--format={ACCOUNTING_FIELDS}"
        )
        job = parse_jobs(text).get(job_id)
        return None if job is None or job.is_active else job

    def was_preempted(self, job_id: str) -> bool:
        """Return whether Slurm has begun to preempt a job. Such a job may end by itself in its grace period."""
        try:
            return has_preemption_time(self.call("scontrol", "show", "job", "--oneliner", job_id))
        except CommandFailed:  # Slurm has forgotten the job
            return False

    def machines(self, max_age_seconds: float) -> tuple[Machine, ...]:
        """Return the machines, from an answer at most `max_age_seconds` old. Raises BackendUnavailable."""
        with self._lock:
            if time.monotonic() - self._machines_read_at > max_age_seconds:
                text = self._query("scontrol", "show", "node", "--oneliner")
                self._machines, self._machines_read_at = parse_machines(text), time.monotonic()
            return self._machines

    def settings(self) -> dict[str, str]:
        """Return Slurm's configuration. Raises BackendUnavailable."""
        lines = (line.partition("=") for line in self._query("scontrol", "show", "config").splitlines())
        return {name.strip(): value.strip() for name, separator, value in lines if separator}

    def permitted_accounts(self) -> set[str]:
        """Return the accounts to which this user may submit, from Slurm's accounting. Raises BackendUnavailable."""
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            raise BackendUnavailable(f"The user {os.getuid()}, as whom the console runs, has no name here.") from None
        cluster = self.settings().get("ClusterName", "")
        text = self._query(
            *("sacctmgr", "--noheader", "--parsable2", "show", "associations"),
            *(f"cluster={cluster}", f"user={user}", "format=account"),
        )
        return set(text.split())

    def submit(self, arguments: Iterable[str], script: str) -> str:
        """Submit a batch job and return its id. Raises CommandFailed, BackendUnavailable."""
        output = self.call("sbatch", "--parsable", *arguments, stdin=script)
        # If there are several clusters, sbatch adds the cluster's name: "17;name".
        return output.strip().partition(";")[0]

    def signal(self, job_id: str, signal: str) -> None:
        """Send a signal (by its name without "SIG") to the tasks of a job. Does nothing if the job has no tasks."""
        self._scancel(f"--signal={signal}", f"{job_id}.0")  # step 0 is the srun of the batch script

    def cancel_waiting(self, job_id: str) -> None:
        """Cancel a job that has no machines yet; do nothing to a job that has."""
        self._scancel("--state=PENDING", job_id)

    def cancel(self, job_id: str) -> None:
        """End a job: SIGTERM to its tasks, SIGKILL after Slurm's KillWait. Does nothing if it has ended."""
        self._scancel(job_id)

    def kill(self, selection: Sequence[str]) -> None:
        """Kill this user's jobs that `selection` (arguments of scancel) selects. There may be none."""
        self._scancel("--signal=KILL", "--me", *selection)

    def _scancel(self, *arguments: str) -> None:
        """Call scancel and ignore its errors for jobs and steps that have ended. Raises BackendUnavailable."""
        try:
            self.call("scancel", "--quiet", *arguments)
        except CommandFailed as error:
            # These words are in Slurm's messages about a controller that does not answer.
            if "contact" in str(error) or "timed out" in str(error):
                raise BackendUnavailable(f"Slurm's scancel failed: {error}") from error
        with self._lock:
            self._jobs_read_at = float("-inf")  # the jobs have changed, so the next `jobs` asks Slurm again
