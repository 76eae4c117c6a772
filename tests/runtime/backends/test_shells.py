"""A shell in a local run, through the console: it is in the run's sandbox, and no rank."""

import asyncio
import json

import pytest

from console.accounts import services
from console.accounts.models import AuditEvent
from runtime.specs import Outcome, RunPhase
from tests.factories.shells import Browser, closing_code
from tests.tools import asgi_console

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.late("its run is of real processes, with time limits of seconds"),
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
def customer(transactional_db, customer, harness, monkeypatch):
    services.set_shells_enabled(organization=customer.organization, is_enabled=True, actor=customer.membership.user)
    monkeypatch.setattr(customer.backend, "shell_socket", harness.backend.shell_socket)
    return customer


def test_a_shell_is_in_the_sandbox_and_neither_its_end_nor_its_attacks_change_the_run(harness, customer, settings):
    attempt = customer.started(nodes=1)
    harness.start(PLACE, text="]", name=attempt.run_name)
    of_the_rank = harness.log(name=attempt.run_name).strip()

    async def run(websocket, command):
        """Return what a command writes, up to a mark that it writes last."""
        await websocket.send(f"{command}; echo do''ne\n".encode())
        output = ""
        while "done" not in output:
            output += (await websocket.recv()).decode()
        return output

    async def use(browser):
        async with browser.websocket(attempt.job_id) as first, browser.websocket(attempt.job_id) as second:
            await first.send(json.dumps({"rows": 30, "columns": 300}))
            of_the_shell = await run(first, "python -c 'import train; print(repr(list(train.place())))'")
            about = await run(first, "echo $RANK/$WORLD_SIZE; stty size; id -u")
            attack = await run(first, "kill -9 1 || echo refused; readlink /proc/1/fd/0 || echo refused")
            await first.send(b"kill -9 $PPID\n")  # the process between the shell and the console
            codes = [await closing_code(first)]
            phase = harness.backend.describe(attempt.run_name).phase
            await second.send(b"touch $OUTPUT_DIR/go\n")  # the run ends with this shell open
            codes.append(await closing_code(second))
        return of_the_shell, about, attack, phase, codes

    with asgi_console() as url:
        settings.TRAINYARD_URL = url
        of_the_shell, about, attack, phase, codes = asyncio.run(use(Browser(url, customer.membership)))
    assert of_the_rank in of_the_shell.replace("\r\n", "")
    assert "0/1\r\n30 300\r\n1000\r\n" in about
    assert attack.count("refused\r\n") == 2
    assert phase is RunPhase.RUNNING
    assert codes == [1000, 1000]
    status = harness.wait_for_end(attempt.run_name)
    assert (status.outcome, status.failure) == (Outcome.COMPLETED, None)
    assert not harness.backend.shell_socket(attempt.run_name, 0).exists()
    actions = AuditEvent.objects.filter(action__startswith="shell.").values_list("action", flat=True)
    assert sorted(actions) == ["shell.closed", "shell.closed", "shell.opened", "shell.opened"]
