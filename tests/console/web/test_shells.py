"""Shells in the nodes of running jobs: the bytes that pass, who gets a shell, what ends it, and the audit log."""

import asyncio
import json
from contextlib import asynccontextmanager
from http import HTTPStatus
from unittest.mock import Mock

import httpx
import pytest
from django.db import connection
from django.urls import reverse
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from console.accounts import services
from console.accounts.models import AuditEvent
from console.serving import shells as gateway
from runtime.errors import BackendUnavailable
from runtime.specs import Outcome
from tests.factories.accounts import MembershipFactory
from tests.factories.shells import Browser, Node, closing_code
from tests.tools import asgi_console

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def customer(transactional_db, customer):
    """The customer, whose organization allows shells, committed: the server reads it in other threads."""
    services.set_shells_enabled(organization=customer.organization, is_enabled=True, actor=customer.membership.user)
    return customer


@pytest.fixture
def attempt(customer):
    """The attempt of a job that runs on two nodes of the fake cluster."""
    return customer.started()


@pytest.fixture
def node(customer, short_folders, monkeypatch):
    """Node 0 of the job, which listens: without it no shell opens."""
    folder = short_folders()

    def shell_socket(_name, node):
        path = folder / f"{node}.shell"
        return path if path.is_socket() else None

    monkeypatch.setattr(customer.backend, "shell_socket", shell_socket)
    with Node(folder / "0.shell").running() as listening:
        yield listening


@pytest.fixture
def browser(settings):
    """`browser(membership)` is a Browser, at a console that is served."""
    with asgi_console() as url:
        settings.TRAINYARD_URL = url
        yield lambda membership: Browser(url, membership)


def audited():
    """Return the audit entries about shells as (action, target, data, address), with 0 for their unknown duration."""
    events = AuditEvent.objects.filter(action__startswith="shell.").order_by("pk")
    return [(event.action, event.target, event.data | {"seconds": 0}, event.address) for event in events]


@pytest.mark.usefixtures("node")
def test_a_shell_passes_bytes_until_it_ends_and_is_in_the_audit_log(browser, customer, attempt):
    member = browser(customer.membership)

    async def use():
        async with member.websocket(attempt.job_id) as websocket:
            assert await websocket.recv() == b"$ "
            await websocket.send(b"ls")
            assert await websocket.recv() == b"i\x00\x02ls"  # the node returns its frames: see `runtime.launcher.shell`
            await websocket.send(json.dumps({"rows": 50, "columns": 200}))
            assert await websocket.recv() == b"s\x00\x04\x00\x32\x00\xc8"  # 4 bytes: 50 rows, 200 columns
            await websocket.send(b"exit")
            return await closing_code(websocket)

    assert asyncio.run(use()) == gateway.CloseCode.ENDED
    target = f"job:{attempt.job_id}"
    assert audited() == [
        ("shell.opened", target, {"node": 0, "seconds": 0}, "127.0.0.1"),
        ("shell.closed", target, {"node": 0, "seconds": 0, "why": "ended"}, "127.0.0.1"),
    ]
    assert {event.actor for event in AuditEvent.objects.filter(target=target, action__startswith="shell.")} == {
        customer.membership.user
    }
    page = httpx.get(f"{member.url}/organization/audit/", headers={"Cookie": member.cookie}).text
    assert f"Closed a shell in node 0 of job #{attempt.job_id}" in page


def test_only_an_admitted_member_on_the_consoles_own_page_gets_a_shell(browser, customer, stranger, attempt, node):
    member = browser(customer.membership)
    viewer = browser(MembershipFactory(organization=customer.organization, role="viewer"))
    logged_out = browser(customer.membership)
    logged_out.session.logout()
    organization = customer.organization

    def refused(websocket):
        async def open_one():
            async with websocket():
                pass

        with pytest.raises(InvalidStatus) as answer:
            asyncio.run(open_one())
        assert answer.value.response.status_code == HTTPStatus.FORBIDDEN

    for other in (browser(stranger), viewer, logged_out):
        refused(lambda other=other: other.websocket(attempt.job_id))
    for origin in ("http://evil.example", member.url.replace("http", "https"), "null"):
        refused(lambda origin=origin: member.websocket(attempt.job_id, origin=origin))
    refused(lambda: member.websocket(attempt.job_id, node=1))  # the job's second node, where no shell listens
    # A page has no websocket.
    refused(lambda: connect(f"{member.url.replace('http', 'ws')}/jobs/", origin=member.url, proxy=None))
    for name, allowed in (("shell_enabled", True), ("requires_second_factor", False)):
        setattr(organization, name, not allowed)
        organization.save()
        refused(lambda: member.websocket(attempt.job_id))
        setattr(organization, name, allowed)
        organization.save()
    # Only the server itself asks Django at this path who is admitted.
    assert httpx.get(f"{member.url}{gateway.GATE_PATH}", headers={"Cookie": member.cookie}).status_code == 404
    customer.end(attempt, Outcome.COMPLETED)
    refused(lambda: member.websocket(attempt.job_id))
    assert (node.connections, audited()) == (0, [])


def test_a_shell_on_another_machine_is_in_the_audit_log_only_if_its_node_answers(
    browser, customer, attempt, node, monkeypatch
):
    member = browser(customer.membership)
    closed = []

    @asynccontextmanager
    async def answering():
        yield await asyncio.open_unix_connection(node.path)
        closed.append(True)

    @asynccontextmanager
    async def unreachable():
        raise BackendUnavailable("Slurm did not start a step for the shell in 30 s.")
        yield  # makes this a generator, as the decorator needs

    async def use():
        async with member.websocket(attempt.job_id) as websocket:
            assert await websocket.recv() == b"$ "
            await websocket.send(b"exit")
            return await closing_code(websocket)

    monkeypatch.setattr(customer.backend, "shell_socket", lambda _name, _node: unreachable)

    async def fail():
        async with member.websocket(attempt.job_id) as websocket:
            return await closing_code(websocket)

    assert asyncio.run(fail()) == gateway.CloseCode.CLUSTER_UNAVAILABLE
    assert audited() == []
    monkeypatch.setattr(customer.backend, "shell_socket", lambda _name, _node: answering)
    assert asyncio.run(use()) == gateway.CloseCode.ENDED
    assert closed == [True]
    assert [action for action, *_rest in audited()] == ["shell.opened", "shell.closed"]


@pytest.mark.usefixtures("node")
def test_an_open_shell_ends_with_the_session_the_job_and_the_setting(browser, customer, attempt, monkeypatch):
    monkeypatch.setattr(gateway, "CHECK_SECONDS", 0.05)

    def set_enabled(*, is_enabled):
        services.set_shells_enabled(
            organization=customer.organization, is_enabled=is_enabled, actor=customer.membership.user
        )
        connection.close()  # of the thread that `closed_by` runs it in

    def end():
        customer.end(attempt, Outcome.COMPLETED)
        connection.close()

    def closed_by(change):
        member = browser(customer.membership)

        async def use():
            async with member.websocket(attempt.job_id) as websocket:
                await websocket.recv()
                await asyncio.to_thread(change, member)
                return await closing_code(websocket)

        return asyncio.run(use())

    assert closed_by(lambda member: member.log_out()) == gateway.CloseCode.NOT_ADMITTED
    assert closed_by(lambda _member: set_enabled(is_enabled=False)) == gateway.CloseCode.NOT_ADMITTED
    set_enabled(is_enabled=True)
    monkeypatch.setattr(gateway, "IDLE_SECONDS", 0.0)
    assert closed_by(lambda _member: None) == gateway.CloseCode.IDLE
    monkeypatch.setattr(gateway, "IDLE_SECONDS", 1800.0)
    assert closed_by(lambda _member: end()) == gateway.CloseCode.NOT_ADMITTED
    # An entry of an opened shell has no reason.
    reasons = [data.get("why") for _action, _target, data, _address in audited()]
    assert reasons == [None, "not_admitted", None, "not_admitted", None, "idle", None, "not_admitted"]


@pytest.fixture
def one_shell(monkeypatch):
    """Limit organizations to one shell. The limit is read when a console is served, so it comes before `browser`."""
    monkeypatch.setattr(gateway, "MAX_SHELLS", 1)


@pytest.mark.usefixtures("one_shell")
def test_a_shell_is_bounded_in_what_it_sends_and_takes(browser, customer, attempt, node):
    node.output = b"x" * (gateway.MAX_UNACKNOWLEDGED_BYTES + 2 * gateway.READ_BYTES)
    member = browser(customer.membership)

    async def read(websocket, size):
        received = 0
        while received < size:
            received += len(await websocket.recv())
        return received

    async def use():
        async with member.websocket(attempt.job_id) as websocket:
            async with member.websocket(attempt.job_id) as another:
                assert await closing_code(another) == gateway.CloseCode.TOO_MANY
            received = await read(websocket, gateway.MAX_UNACKNOWLEDGED_BYTES)
            assert received < len(node.output)  # the rest waits until this has been drawn
            await websocket.send(json.dumps({"seen": received}))
            await read(websocket, len(node.output) - received)
            await websocket.send(b"x" * (gateway.MAX_INPUT_BYTES + 1))
            return await closing_code(websocket)

    assert asyncio.run(use()) == gateway.CloseCode.INVALID
    for invalid in ('{"rows": 0, "columns": 80}', '{"seen": 1000000000}', '{"rows": "1"}', "[", "[" * 100_000):

        async def send_invalid(text=invalid):
            async with member.websocket(attempt.job_id) as websocket:
                await websocket.send(text)
                return await closing_code(websocket)

        assert asyncio.run(send_invalid()) == gateway.CloseCode.INVALID, invalid


@pytest.mark.usefixtures("node")
def test_pages_offer_a_shell_to_those_who_may_open_one(client, api, customer, attempt):
    address = reverse("job_shell", args=[attempt.job_id, 0])
    nodes = f"{reverse('job_detail', args=[attempt.job_id])}?tab=nodes"

    def shown(membership, url):
        client.force_login(membership.user)
        answer = client.get(url)
        return answer, answer.content.decode()

    assert address in shown(customer.membership, nodes)[1]
    answer, page = shown(customer.membership, address)
    assert f'data-socket="{address}socket"' in page
    directives = answer["Content-Security-Policy"].split("; ")  # in any order
    assert {"default-src 'none'", "script-src 'self'"} <= set(directives)
    viewer = MembershipFactory(organization=customer.organization, role="viewer")
    assert address not in shown(viewer, nodes)[1]
    assert shown(viewer, address)[0].status_code == HTTPStatus.FORBIDDEN
    no_such_node = reverse("job_shell", args=[attempt.job_id, 2])  # the job has nodes 0 and 1
    assert shown(customer.membership, no_such_node)[0].status_code == HTTPStatus.NOT_FOUND
    customer.backend.shell_socket = Mock(side_effect=BackendUnavailable("The run's folder cannot be read."))
    assert "be reached now. Try again in a few minutes." in shown(customer.membership, address)[1]
    customer.backend.shell_socket = lambda _name, _node: None  # the node has ended
    assert "This node does not run" in shown(customer.membership, address)[1]
    assert client.post(reverse("organization_shells"), {"enabled": "0"}).status_code == HTTPStatus.FOUND
    assert "Your organization does not allow shells." in shown(customer.membership, address)[1]
    assert address not in shown(customer.membership, nodes)[1]
    client.force_login(MembershipFactory(organization=customer.organization, role="member").user)
    assert client.post(reverse("organization_shells"), {"enabled": "1"}).status_code == HTTPStatus.FORBIDDEN
    assert AuditEvent.objects.filter(action="organization.shells_disabled").count() == 1
    for membership, status in ((customer.membership, HTTPStatus.OK), (viewer, HTTPStatus.FORBIDDEN)):
        answer = api(membership).patch("/api/v1/organization/", {"shell_enabled": True}, format="json")
        assert answer.status_code == status
    assert client.get("/api/v1/organization/").json()["shell_enabled"]
