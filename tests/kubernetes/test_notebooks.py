"""Notebooks in Pods: what reaches JupyterLab through the API server, for whom, and what remains of failures."""

import asyncio
import json
import os
import tempfile
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
from kubernetes.stream import portforward
from websockets.exceptions import InvalidStatus

from jobs import run_specs
from runtime.backends.kubernetes import notebooks as tunnels
from runtime.backends.kubernetes.client import WebsocketTarget
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.pod_plan import NOTEBOOK_PORT, build_pod_inputs
from runtime.errors import BackendUnavailable, RunNotFound
from runtime.images import venvs
from runtime.specs import Image, Outcome, Resources, RunPhase
from tests.console.processes import wait_for
from tests.factories.notebooks import Browser, sell_notebook
from tests.kubernetes.harness import KubernetesHarness
from tests.kubernetes.images import FAKE_TORCH_IMAGE, python_image
from tests.runtime.backends.cluster_runs import create_limited_backend, forbid
from tests.runtime.images_of_ours import IMAGES
from tests.tools import asgi_console

pytestmark = pytest.mark.slow

NAME = "job-1-1"
ECHO = """
    import http.server
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
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 8888), Handler)
    print("ready", flush=True)
    server.serve_forever()
"""
"""Listens where JupyterLab does."""
IDLE_SECONDS = "1800"
"""The notebook's argument: after so long without use it ends. No test lasts that long."""
BODY = os.urandom(3 << 20)
"""Larger than a message of the websocket and than the buffers of sockets."""


async def post(backend, body, name=NAME):
    """Return the response of a run's program to a body."""
    async with backend.notebook_socket(name)() as path:
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with httpx.AsyncClient(transport=transport, timeout=60) as client:
            return (await client.post("http://localhost/", content=body)).content


def run(work):
    """Return the result of a coroutine, once each task that it has started has ended."""

    async def work_and_wait():
        try:
            return await work
        finally:
            async with asyncio.timeout(30):
                await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    return asyncio.run(work_and_wait())


@pytest.fixture
def tunnel_folders(short_folders, monkeypatch):
    """Where tunnels create their folders."""
    folder = short_folders()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def echo(own_harness):
    """A run whose program returns the body of each request."""
    own_harness.start(ECHO, name=NAME)


@pytest.mark.usefixtures("echo")
def test_the_roles_permissions_suffice_to_reach_a_notebook_that_starts_late(
    own_harness, fake, tunnel_folders, monkeypatch
):
    config = own_harness.config()
    permitted = create_limited_backend(own_harness, fake, config)
    dial_of, early = fake.api.dial_of, [True]

    def refuse_first(namespace, name):
        """Connect as the kubelet does, but find no server the first time."""

        def dial(port):
            if early:
                early.pop()
                raise ConnectionRefusedError("connection refused")
            return dial_of(namespace, name)(port)

        return dial

    monkeypatch.setattr(fake.api, "dial_of", refuse_first)
    assert run(post(permitted, BODY)) == BODY
    assert not early, "the first connection was refused"

    async def post_together():  # each over a connection of its own
        return await asyncio.gather(*(post(permitted, b"%d" % number) for number in range(5)))

    assert run(post_together()) == [b"%d" % number for number in range(5)]
    wait_for(lambda: not fake.server.forwards, 30)
    assert list(tunnel_folders.iterdir()) == []
    forbid(fake, config, "pods/portforward")
    with pytest.raises(BackendUnavailable, match="403"):
        run(post(permitted, b""))


def post_with_the_official_client(site):
    """Return the response to "ok" through the port forwarding of the official client.

    That client works with real clusters. If it works with the fake server too, tests of our client there are valid.
    """
    (pod,) = site.pods(NAME)
    forwarded = portforward(
        site.core.connect_get_namespaced_pod_portforward, pod.metadata.name, site.namespace, ports="8888"
    )
    official = forwarded.socket(8888)
    official.settimeout(60)
    official.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    received = b""
    while part := official.recv(65536):
        received += part
    official.close()
    forwarded.websocket.shutdown()  # the official client leaves it open
    return received


@pytest.mark.usefixtures("echo")
def test_a_connection_ends_with_the_pod_and_then_there_is_no_notebook(own_harness, fake, tunnel_folders):
    assert post_with_the_official_client(own_harness.site).endswith(b"\r\n\r\nok")
    backend = own_harness.backend

    async def read_until_the_end():
        """Return what a client that waits for a response gets when the Pod ends."""
        async with backend.notebook_socket(NAME)() as path:
            reader, writer = await asyncio.open_unix_connection(path)
            await asyncio.to_thread(backend.stop, NAME, 0)
            try:
                return await reader.read()
            finally:
                writer.close()

    assert run(read_until_the_end()) == b""
    own_harness.wait_for_outcome(Outcome.STOPPED)
    # The backend remembers the Pod of a notebook that has answered, until it cannot connect to it.
    with pytest.raises(BackendUnavailable):
        run(post(backend, b""))
    with pytest.raises(RunNotFound):
        run(post(backend, b""))
    # Another process of the console remembers no Pod.
    with pytest.raises(RunNotFound):
        run(post(own_harness.new_backend(), b""))
    with pytest.raises(RunNotFound):
        run(post(backend, b"", "job-9-9"))
    fake.faults.down = True
    with pytest.raises(BackendUnavailable):
        run(post(own_harness.new_backend(), b""))
    fake.faults.disarm()
    wait_for(lambda: not fake.server.forwards, 30)
    assert list(tunnel_folders.iterdir()) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # asyncio leaves the refused socket open
@pytest.mark.parametrize("same_server", [True, False])
def test_credentials_follow_no_redirect(same_server):
    """`same_server`: whether the redirect leads to another path of the server itself."""
    requests = []

    async def connect_and_be_redirected():
        async def record(reader, writer):
            requests.append(await reader.read(65536))
            writer.write(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: %s\r\n\r\n" % location.encode())
            writer.close()

        async with (
            await asyncio.start_server(record, "127.0.0.1", 0) as server,
            await asyncio.start_server(record, "127.0.0.1", 0) as elsewhere,
        ):
            port, other_port = (each.sockets[0].getsockname()[1] for each in (server, elsewhere))
            location = f"ws://127.0.0.1:{port if same_server else other_port}/elsewhere"
            target = WebsocketTarget(f"ws://127.0.0.1:{port}/", {"authorization": "Bearer secret"}, None, None, None)
            api = SimpleNamespace(websocket_target=lambda _path, **_query: target)
            pod = {"metadata": {"namespace": "runs", "name": "pod"}, "status": {"phase": "Running"}}
            runs = SimpleNamespace(get_job=lambda name: name, list_pods=lambda _job: [pod])
            with pytest.raises(BackendUnavailable, match="redirect"):
                async with tunnels.NotebookTunnels(api, runs).open(NAME):
                    pass

    asyncio.run(connect_and_be_redirected())
    # asyncio connects to the redirect's target before the client refuses it. Nothing is sent over that connection.
    assert [b"Bearer secret" in request for request in requests if request] == [True]


# --- JupyterLab, through the console ----------------------------------------------------------------------------------


@pytest.fixture
def harness(fake_site):
    assert venvs.is_ready(IMAGES, "pytorch"), "Run 'python manage.py build_image pytorch' first."
    fake_site.fake.registry.images[FAKE_TORCH_IMAGE] = python_image(IMAGES / "pytorch")
    created = KubernetesHarness(fake_site, images={"pytorch": FAKE_TORCH_IMAGE})
    yield created
    created.close()


@pytest.fixture
def notebook(transactional_db, customer, harness, monkeypatch):
    """A customer's notebook, sold on the customer's fake backend, while its JupyterLab starts in a Pod.

    The console reaches JupyterLab through the harness's backend. The fake backend answers all other calls.
    """
    monkeypatch.setattr(tunnels, "_START_SECONDS", 300.0)  # for JupyterLab's start on a busy machine
    monkeypatch.setattr(customer.backend, "notebook_socket", harness.backend.notebook_socket)
    attempt = sell_notebook(customer)
    spec = harness.spec(
        name=attempt.run_name, image=Image(builtin="pytorch"), script="", builtin_script="notebook",
        arguments=(IDLE_SECONDS,), resources=Resources(cpus=1, memory_mib=2048), deadline_seconds=3600,
    )  # fmt: skip
    harness.backend.submit(spec)
    harness.wait(spec.name, lambda status: status.phase is RunPhase.RUNNING)
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


@pytest.mark.rerun_if_late("a handshake has 10 seconds, through the API server to a JupyterLab that has just started")
@pytest.mark.torch
@pytest.mark.cores(2)
@pytest.mark.django_db(transaction=True)
def test_jupyterlab_in_a_pod_serves_members_until_the_pod_ends(harness, customer, stranger, notebook, settings):
    with asgi_console() as url:
        settings.TRAINYARD_URL = url
        settings.NOTEBOOK_URL = f"http://localhost:{urlsplit(url).port}"
        other, without_cookie, member = (
            Browser(url, membership, notebook.job_id)
            for membership in (stranger, customer.membership, customer.membership)
        )
        assert other.ticket() == ""
        for refused in (other, without_cookie):
            assert refused.ask("/api").status_code == HTTPStatus.FORBIDDEN
        member.enter()
        page = member.ask("/lab")
        assert page.status_code == HTTPStatus.OK, harness.all_logs(notebook.run_name)
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
                await asyncio.to_thread(harness.backend.stop, notebook.run_name, 0)
                async for _message in websocket:  # until the console closes it
                    pass
            return output

        # 111 is ECONNREFUSED: JupyterLab does not listen on the address that other Pods see.
        assert asyncio.run(use_kernel()) == "0 111 ['train.py']\n"
        harness.wait_for_end(notebook.run_name)
        ended = member.ask("/lab")  # the Pod has ended, but the console does not know that yet
        assert (ended.status_code, ended.json()["code"]) == (HTTPStatus.BAD_GATEWAY, "tool_ended")
        customer.end(notebook, Outcome.STOPPED)
        ended = member.ask("/lab")
        assert ended.status_code == HTTPStatus.FORBIDDEN
        assert "This notebook is not open here" in ended.text
        for browser in (other, without_cookie, member):
            browser.http.close()


@pytest.mark.django_db
def test_a_pod_gets_the_limits_that_were_bought(customer):
    """The launcher in the Pod keeps them. `backends/golden/cpu.json` shows that the kubelet's deadline is later."""
    bought = run_specs.run_spec(sell_notebook(customer, max_seconds=5400, idle_seconds=900))
    config = ClusterConfig.from_data("test", {"volume": {"claim": "trainyard", "root": "/srv/trainyard"}})
    plan = build_pod_inputs(bought, config, Path("/srv/trainyard/runs")).pod_plan
    assert plan["deadline_seconds"] == 5400
    assert plan["plan"]["arguments"] == ["900", str(NOTEBOOK_PORT)]
