"""A shell in a run of each backend, through the console: it is in the run's sandbox, and no rank."""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from console.accounts import services
from console.accounts.models import AuditEvent
from console.serving.shells import open_connection
from runtime.backends.kubernetes import portforward
from runtime.backends.kubernetes.shells import ShellTunnels
from runtime.backends.supervision.shell_socket import ShellSocket
from runtime.errors import BackendUnavailable, RunNotFound
from runtime.launcher.shell import HEADER, INPUT
from runtime.specs import Outcome, RunPhase
from tests.console.processes import wait_for
from tests.factories.shells import Browser, closing_code
from tests.runtime.backends.cluster_runs import create_limited_backend, forbid
from tests.runtime.backends.contract import WAIT
from tests.tools import asgi_console

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.rerun_if_late("its run is of real processes, with time limits of seconds"),
]
PLACE = """
    import os, pathlib, time
    def place():
        for name in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"):
            yield os.readlink(f"/proc/self/ns/{name}")
        status = pathlib.Path("/proc/self/status").read_text().splitlines()
        yield from (line for line in status if line.startswith(("Uid", "Cap", "NoNewPrivs", "Seccomp")))
        yield pathlib.Path("/proc/self/cgroup").read_text()
        yield str(pathlib.Path("/proc/self/limits").read_text())
        yield os.getcwd()
    if __name__ == "__main__":
        print(repr(list(place())), flush=True)
        while not os.path.exists(os.environ["OUTPUT_DIR"] + "/go"):
            time.sleep(0.05)
"""
"""Prints where it runs and what it may do, then waits for the shell."""


@pytest.fixture
def customer(transactional_db, customer, any_harness, monkeypatch):
    """A customer who may open shells. The console has a fake backend, but takes shells from that of the harness."""
    services.set_shells_enabled(organization=customer.organization, is_enabled=True, actor=customer.membership.user)
    monkeypatch.setattr(customer.backend, "shell_socket", any_harness.backend.shell_socket)
    return customer


async def open_and_close(tunnel):
    async with tunnel():
        pass


def is_refused(address):
    """Return whether no shell can be opened. Kubernetes alone finds out only when it opens one."""
    if address is None:
        return True
    with pytest.raises((RunNotFound, BackendUnavailable)):
        asyncio.run(open_and_close(address))
    return True


def test_a_shell_is_in_the_sandbox_and_neither_its_end_nor_its_attacks_change_the_run(any_harness, customer, settings):
    harness = any_harness
    attempt = customer.started(nodes=1)  # the console's rows of a running job, for the run that starts below
    harness.start(PLACE, text="]", name=attempt.run_name)  # "]" ends the list that the rank prints
    of_the_rank = harness.log(name=attempt.run_name).strip()

    async def run(websocket, command):
        """Return what a command writes, up to a mark that it writes last."""
        await websocket.send(f"{command}; echo do''ne\n".encode())  # the terminal echoes this line, without "done"
        output = ""
        while "done" not in output:
            output += (await websocket.recv()).decode()
        return output

    async def use(browser):
        # Two shells: the first is killed, and the second is open when the run ends.
        async with browser.websocket(attempt.job_id) as first, browser.websocket(attempt.job_id) as second:
            await first.send(json.dumps({"rows": 30, "columns": 300}))
            of_the_shell = await run(first, "python -c 'import train; print(repr(list(train.place())))'")
            about = await run(first, "echo $RANK/$WORLD_SIZE; stty size")
            attacks = await run(first, "kill -9 1 || echo refused; readlink /proc/1/fd/0 || echo refused")
            await first.send(b"kill -9 $PPID\n")  # the process between the shell and the console
            codes = [await closing_code(first)]
            phase = harness.backend.describe(attempt.run_name).phase
            await second.send(b"touch $OUTPUT_DIR/go\n")  # the run ends with this shell open
            codes.append(await closing_code(second))
        return of_the_shell, about, attacks, phase, codes

    with asgi_console() as url:
        settings.TRAINYARD_URL = url
        of_the_shell, about, attacks, phase, codes = asyncio.run(use(Browser(url, customer.membership)))
    assert of_the_rank in of_the_shell.replace("\r\n", "")
    assert "0/1\r\n30 300\r\n" in about
    assert attacks.count("refused\r\n") == 2
    assert phase is RunPhase.RUNNING
    assert codes == [1000, 1000], "both websockets were closed normally"
    status = harness.wait_for_end(attempt.run_name)
    assert (status.outcome, status.failure) == (Outcome.COMPLETED, None)
    assert is_refused(harness.backend.shell_socket(attempt.run_name, 0))
    actions = AuditEvent.objects.filter(action__startswith="shell.").values_list("action", flat=True)
    assert sorted(actions) == ["shell.closed", "shell.closed", "shell.opened", "shell.opened"]


# --- Without the console ----------------------------------------------------------------------------------------------


async def output_of(address, command, until):
    """Open a shell, type a command into it, and return what it writes up to a text."""
    async with open_connection(address) as (reader, writer):
        writer.write(HEADER.pack(INPUT, len(command)) + command)
        output = b""
        while until not in output:
            data = await reader.read(4096)
            assert data, output
            output += data
        return output


def test_each_node_has_shells_of_its_own_until_it_ends(any_harness):
    any_harness.start(WAIT, nodes=2)
    backend = any_harness.new_backend()
    for node in range(2):
        address = backend.shell_socket("job-1-1", node)
        assert asyncio.run(output_of(address, b"echo rank=$RANK.\n", b"rank=%d." % node))

    async def read_until_the_run_ends():
        async with open_connection(backend.shell_socket("job-1-1", 1)) as (reader, _writer):
            await asyncio.to_thread(backend.stop, "job-1-1", 0)
            async with asyncio.timeout(any_harness.patience):
                with contextlib.suppress(ConnectionResetError):  # a shell that is killed may not have read everything
                    await reader.read(-1)

    asyncio.run(read_until_the_run_ends())
    any_harness.wait_for_end()
    assert is_refused(any_harness.new_backend().shell_socket("job-1-1", 1))


@pytest.mark.slow
@pytest.mark.local_backend
def test_a_step_of_slurm_knows_no_secret_ends_with_its_shell_and_says_why_it_finds_no_node(slurm_harness, monkeypatch):
    """For each shell, the console starts a step of the run's job, which passes bytes to the node's socket."""
    monkeypatch.setenv("TRAINYARD_PROBE", "a secret of the console")
    slurm_harness.start(WAIT)

    def steps():
        return slurm_harness.cluster.call("squeue", "--steps", "--noheader", "--format=%i %j").splitlines()

    before = steps()

    async def use():
        async with slurm_harness.backend.shell_socket("job-1-1", 0)():
            return await asyncio.to_thread(steps), await asyncio.to_thread(relays_environments)

    steps_of_the_shell, environments = asyncio.run(use())
    assert len(steps_of_the_shell) == len(before) + 1
    assert environments
    assert not any(b"a secret of the console" in environment for environment in environments)
    wait_for(lambda: steps() == before, 30)
    assert slurm_harness.backend.describe("job-1-1").phase is RunPhase.RUNNING
    # Without its socket, the node has no more shells: a shell that is opened just then says why.
    ShellSocket(slurm_harness.folder / "runs" / "job-1-1", 0).remove()
    tunnel = slurm_harness.backend._shells
    with pytest.raises(BackendUnavailable, match="No such file"):
        asyncio.run(open_and_close(lambda: tunnel.open(slurm_harness.backend._find("job-1-1"), 0)))
    assert slurm_harness.backend.shell_socket("job-1-1", 0) is None


def relays_environments():
    """Return the environments of the processes that pass bytes, as Slurm started them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            if b"shell_relay import" in (folder / "cmdline").read_bytes():
                found.append((folder / "environ").read_bytes())
    return found


def test_a_shell_whose_streams_cannot_be_opened_leaves_no_task(monkeypatch):
    """The task would pass bytes between the node and a socket that nobody reads."""
    tunnels = ShellTunnels(api=None, runs=None)
    monkeypatch.setattr(tunnels, "_find", lambda _name, _node: (None, "token"))

    async def connect_to(_target):
        return contextlib.AsyncExitStack()  # as a connection, it can be entered and left

    async def fail(**_options):
        raise OSError("too many open files")

    monkeypatch.setattr(portforward, "connect_to", connect_to)
    monkeypatch.setattr(asyncio, "open_unix_connection", fail)

    async def open_one():
        with pytest.raises(OSError, match="too many open files"):
            await open_and_close(lambda: tunnels.open("job-1-1", 0))
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(open_one()) == set()


@pytest.mark.slow
def test_a_pods_shells_need_the_permission_of_the_role_and_the_runs_token(own_harness, fake, monkeypatch):
    own_harness.start(WAIT)
    config = own_harness.config()
    permitted = create_limited_backend(own_harness, fake, config)
    tunnel = permitted.shell_socket("job-1-1", 0)
    assert asyncio.run(output_of(tunnel, b"echo rank=$RANK.\n", b"rank=0."))
    wait_for(lambda: not fake.server.forwards, 30)

    async def without_token(sent=None):
        """Send these bytes, by default a token with a wrong last character; return what the pod answers."""
        target, token = permitted._shells._find("job-1-1", 0)
        async with await portforward.connect_to(target) as connection:
            await portforward.send(connection, sent or token.encode()[:-1] + b"-")
            return [data async for data in portforward.receive(connection)]

    assert asyncio.run(without_token()) == [], "not even a prompt"
    commands = HEADER.pack(INPUT, 64) + b"echo\n" * 13  # at once, in place of the 64 characters of a token
    assert asyncio.run(without_token(commands)) == []
    with pytest.raises(RunNotFound):
        asyncio.run(open_and_close(permitted.shell_socket("job-1-1", 1)))
    forbid(fake, config, "pods/portforward")
    with pytest.raises(BackendUnavailable, match="403"):
        asyncio.run(open_and_close(tunnel))
