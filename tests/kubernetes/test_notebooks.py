"""Notebooks in Pods: what reaches JupyterLab through the API server, for whom, and what remains of failures."""

import asyncio
import json
import os
import tempfile
import threading
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from kubernetes.stream import portforward
from websockets.exceptions import InvalidStatus

from runtime.backends.kubernetes import notebooks as tunnels
from runtime.backends.kubernetes.rbac import rbac
from runtime.errors import BackendUnavailable, RunNotFound
from runtime.images import venvs
from runtime.specs import Image, Outcome, Resources, RunPhase
from tests.console.processes import wait_for
from tests.factories.notebooks import Browser, sell_notebook
from tests.kubernetes.images import TORCH, python_image
from tests.kubernetes.yard import ClusterYard
from tests.runtime.backends.cluster_runs import limited
from tests.runtime.images_of_ours import IMAGES
from tests.tools import asgi_console

pytestmark = pytest.mark.slow

NAME = "job-1-1"
ECHO = """
    import http.server, time
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        do_GET = lambda self: self.send_error(404)
        log_message = print
    print("ready", flush=True)
    time.sleep(2)
    http.server.ThreadingHTTPServer(("127.0.0.1", 8888), Handler).serve_forever()
"""
"""Listens where JupyterLab does, a while after its Pod runs."""
BODY = os.urandom(3 << 20)


async def post(backend, body, name=NAME):
    """Return the response of a run's program to a body."""
    async with backend.notebook_socket(name)() as path:
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with httpx.AsyncClient(transport=transport, timeout=60) as client:
            return (await client.post("http://localhost/", content=body)).content


def open_resources():
    """The descriptors and threads of this process, and the folders of tunnels."""
    lookups = [thread for thread in threading.enumerate() if not thread.name.startswith("notebook-lookup")]
    return psutil.Process().num_fds(), len(lookups), len(list(Path(tempfile.gettempdir()).glob("trainyard-*/s")))


def test_requests_reach_a_port_of_the_pod_alone_and_nothing_stays_open(own_yard, fake):
    own_yard.start(ECHO, name=NAME)
    own_yard.wait(NAME, lambda status: status.phase is RunPhase.RUNNING)
    config = own_yard.config()
    rules = next(each["rules"] for each in rbac(config) if each["kind"] == "Role")
    permitted = limited(own_yard, fake, config, rules)
    # The first request waits for the program; all have connections of their own.
    assert asyncio.run(post(permitted, BODY)) == BODY

    async def post_together():
        return await asyncio.gather(*(post(permitted, b"%d" % number) for number in range(5)))

    assert asyncio.run(post_together()) == [b"%d" % number for number in range(5)]
    # The official client, which is tried on real clusters, agrees with the fake one on the protocol.
    (pod,) = own_yard.site.pods(NAME)
    official = portforward(
        own_yard.site.core.connect_get_namespaced_pod_portforward, pod.metadata.name, own_yard.site.namespace,
        ports="8888",
    ).socket(8888)  # fmt: skip
    official.settimeout(60)
    official.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    received = b""
    while part := official.recv(65536):
        received += part
    official.close()
    assert received.endswith(b"\r\n\r\nok")

    another = own_yard.another()
    another.describe(NAME)
    wait_for(lambda: not fake.server.forwards)
    before = open_resources()
    fake.store.edit("roles", config.namespace, "r", lambda role: role.update(rules=_without_portforward(rules)))
    with pytest.raises(BackendUnavailable, match="403"):
        asyncio.run(post(permitted, b""))
    backend = own_yard.backend
    fake.faults.down = True
    with pytest.raises(BackendUnavailable):
        asyncio.run(post(backend, b""))
    fake.faults.disarm()

    async def cut(stop):
        """Return what a client that waits for a response gets when the Pod ends."""
        async with backend.notebook_socket(NAME)() as path:
            reader, writer = await asyncio.open_unix_connection(path)
            await asyncio.to_thread(stop)
            try:
                return await reader.read()
            finally:
                writer.close()

    wait_for(backend.is_reachable)
    assert asyncio.run(cut(lambda: backend.stop(NAME, 0))) == b""
    assert own_yard.wait_for_end().outcome is Outcome.STOPPED
    with pytest.raises((RunNotFound, BackendUnavailable)):
        asyncio.run(post(backend, b""))
    with pytest.raises(RunNotFound):
        asyncio.run(post(another, b""))
    with pytest.raises(RunNotFound):
        asyncio.run(post(backend, b"", name="job-2-1"))
    wait_for(lambda: not fake.server.forwards, 30)
    wait_for(lambda: all(now <= then for now, then in zip(open_resources(), before, strict=True)), 30)


def _without_portforward(rules):
    return [rule for rule in rules if rule["resources"] != ["pods/portforward"]]


# --- JupyterLab, through the console ----------------------------------------------------------------------------------


@pytest.fixture
def yard(fake_site):
    assert venvs.is_ready(IMAGES, "pytorch"), "Run 'python manage.py build_image pytorch' first."
    fake_site.fake.registry.images[TORCH] = python_image(IMAGES / "pytorch")
    created = ClusterYard(fake_site, images={"pytorch": TORCH})
    yield created
    created.close()


@pytest.fixture
def notebook(transactional_db, customer, yard, monkeypatch):
    """A customer's notebook whose JupyterLab starts in a Pod."""
    monkeypatch.setattr(tunnels, "_START_SECONDS", 300.0)
    monkeypatch.setattr(customer.backend, "notebook_socket", yard.backend.notebook_socket)
    attempt = sell_notebook(customer)
    spec = yard.spec(
        name=attempt.run_name, image=Image(builtin="pytorch"), script="", builtin_script="notebook",
        arguments=("3600",), resources=Resources(cpus=1, memory_mib=2048), deadline_seconds=3600,
    )  # fmt: skip
    yard.backend.submit(spec)
    yard.wait(spec.name, lambda status: status.phase is RunPhase.RUNNING)
    return attempt


CELL = """
import os, socket
def connect(address):
    with socket.socket() as client:
        return client.connect_ex((address, 8888))
print(connect("127.0.0.1"), connect(os.environ["MASTER_ADDR"]), sorted(os.listdir()))
"""
"""Tells whether JupyterLab listens for this Pod's own processes, and on the address that other Pods see."""
EXECUTE = {
    "channel": "shell",
    "header": {"msg_id": "1", "msg_type": "execute_request", "version": "5.3", "session": "1", "username": ""},
    "parent_header": {},
    "metadata": {},
    "content": {"code": CELL, "silent": False},
}


@pytest.mark.torch
@pytest.mark.cores(2)
@pytest.mark.django_db(transaction=True)
def test_jupyterlab_in_a_pod_serves_members_until_the_pod_ends(yard, customer, stranger, notebook, settings):
    with asgi_console() as url:
        settings.TRAINYARD_URL = url
        settings.NOTEBOOK_URL = f"http://localhost:{urlsplit(url).port}"
        other, nobody, member = (
            Browser(url, membership, notebook.job_id)
            for membership in (stranger, customer.membership, customer.membership)
        )
        assert other.ticket() == ""
        for refused in (other, nobody):  # nobody has no cookie of the notebook
            assert refused.ask("/api").status_code == HTTPStatus.FORBIDDEN
        member.enter()
        page = member.ask("/lab")
        assert page.status_code == HTTPStatus.OK, yard.all_logs(notebook.run_name)
        assert "JupyterLab" in page.text
        assert member.ask("/api/contents/train.py").json()["name"] == "train.py"
        kernel = member.ask("/api/kernels", method="POST", Origin=f"http://{member.host}").json()["id"]

        async def use_kernel():
            with pytest.raises(InvalidStatus, match="403"):
                async with other.websocket(path=f"/api/kernels/{kernel}/channels"):
                    pass
            async with member.websocket(path=f"/api/kernels/{kernel}/channels") as websocket:
                await websocket.send(json.dumps(EXECUTE))
                output = ""
                while not output:
                    message = json.loads(await websocket.recv())
                    assert message["msg_type"] != "error", message
                    output = message["content"].get("text", "")
                await asyncio.to_thread(yard.backend.stop, notebook.run_name, 0)
                async for _message in websocket:  # until the console closes it
                    pass
            return output

        assert asyncio.run(use_kernel()) == "0 111 ['train.py']\n"
        yard.wait_for_end(notebook.run_name)
        ended = member.ask("/lab")
        assert (ended.status_code, ended.json()["code"]) == (HTTPStatus.BAD_GATEWAY, "tool_ended")
        customer.end(notebook, Outcome.STOPPED)
        ended = member.ask("/lab")
        assert ended.status_code == HTTPStatus.FORBIDDEN
        assert "This notebook is not open here" in ended.text
        for browser in (other, nobody, member):
            browser.http.close()
