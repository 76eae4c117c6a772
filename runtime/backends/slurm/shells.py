"""Connect to the shells of a node, by a job step of Slurm.

A node's shells are opened through a Unix socket on its machine (`shell_socket`). To reach it, the console has Slurm add
a step to the run's job: `srun` starts `shell_relay` on that machine, and its stdin and stdout are the connection. Slurm
authenticates the console, and ends the step with the job. The step shares the job's resources and uses hardly any.
"""

from __future__ import annotations

import asyncio
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from runtime.backends.slurm import program
from runtime.backends.slurm.commands import Slurm, shorten_error
from runtime.backends.slurm.runs import SlurmRun
from runtime.backends.supervision import shell_socket
from runtime.errors import BackendUnavailable
from runtime.launcher.shell import READY

_START_SECONDS = 30.0
"""How long Slurm may take to start the step. It usually takes less than a second; a busy controller takes several."""
_END_SECONDS = 10.0
"""How long the step may take to end after its stdin is closed, before Slurm is asked to end it."""
_KILL_SECONDS = 5.0
"""How long srun, which ends the step when it gets SIGTERM, may take to end. Then it is killed."""


class ShellSteps:
    """Opens connections to shells. `root` holds the runs, `images_root` the built-in images; both are shared."""

    def __init__(self, slurm: Slurm, root: Path, images_root: Path) -> None:
        self._slurm = slurm
        self._root = root
        self._images_root = images_root

    @asynccontextmanager
    async def open(self, run: SlurmRun, node: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect to a new shell in a node. See `runtime.backends.base.ShellTunnel`."""
        arguments = await asyncio.to_thread(self._arguments, run, node)
        # The caller gets `ours` as streams. srun gets `theirs` as its stdin and stdout.
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            with theirs:  # closed here, so that `reader` ends when srun does
                srun = await self._slurm.start("srun", arguments, stdio_fd=theirs.fileno())
            try:
                await _wait_until_ready(reader, srun)
                yield reader, writer
            finally:
                writer.close()  # ends srun's stdin, and so the step
                await _wait_for_end(srun)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _arguments(self, run: SlurmRun, node: int) -> list[str]:
        """Return the arguments of srun. Raises RunNotFound, BackendUnavailable."""
        submission = run.submission()
        machine = run.machine_of(node)
        if not machine:
            raise BackendUnavailable(f"Node {node} of the run '{run.name}' has not started.")
        package = program.install_node_program(self._root)
        python = program.interpreter(self._images_root, run.spec().image)
        code = (
            f"import sys; sys.path[:0] = [{str(package)!r}]; "
            "from runtime.backends.slurm.shell_relay import start; start()"
        )
        path = str(shell_socket.path_of(run.folder, node))
        return [
            f"--jobid={submission['job_id']}",
            "--overlap",  # the job's first step has all of its resources
            f"--nodelist={machine}",
            *("--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gres=none", "--mpi=none", "--export=ALL"),
            "--job-name=shell",
            "--chdir=/",
            "--quiet",
            "--unbuffered",  # else Slurm passes whole lines only, and a prompt ends with no line break
            # -I and -S: no environment variable and no site-packages of the machine change what the interpreter imports
            *(str(python), "-I", "-S", "-c", code, path),
        ]


async def _wait_until_ready(reader: asyncio.StreamReader, srun: Process) -> None:
    """Wait until the node has accepted the connection. Raises BackendUnavailable."""
    try:
        async with asyncio.timeout(_START_SECONDS):
            if await reader.read(len(READY)) == READY:
                return
            errors = b"" if srun.stderr is None else await srun.stderr.read()
    except TimeoutError:
        raise BackendUnavailable(f"Slurm did not start a step for the shell in {_START_SECONDS:g} s.") from None
    except OSError as error:
        raise BackendUnavailable(f"The step for the shell was lost: {error}.") from error
    reason = shorten_error(errors.decode("utf-8", "replace"))
    raise BackendUnavailable(f"Slurm could not start a step for the shell: {reason}")


async def _wait_for_end(srun: Process) -> None:
    """Wait until srun, whose stdin is closed, has ended; end it if that takes too long."""
    for end, seconds in ((srun.terminate, _END_SECONDS), (srun.kill, _KILL_SECONDS)):
        try:
            async with asyncio.timeout(seconds):
                await srun.wait()
                return
        except TimeoutError:
            with suppress(ProcessLookupError):
                end()
    await srun.wait()
