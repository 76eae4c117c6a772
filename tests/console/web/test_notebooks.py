"""Notebooks: their pages and API, and which people, requests and headers reach JupyterLab through its host name."""

import asyncio
import json
import os
import re
import socket
import threading
from contextlib import contextmanager
from http import HTTPStatus
from urllib.parse import urlsplit

import pytest
from django.urls import reverse
from websockets.asyncio.client import connect
from websockets.asyncio.server import unix_serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Response

from billing.models import Quote
from console.core.errors import InvalidInput
from console.serving import gate, websocket_protocol
from console.serving import notebooks as gateway
from jobs import notebooks, results
from jobs.errors import NoNotebooks
from jobs.models import Job
from runtime.launcher.notebook import SOCKET
from runtime.specs import Outcome
from tests.factories.accounts import MembershipFactory
from tests.factories.notebooks import Browser, notebook_form, sell_notebook
from tests.factories.storage import DatasetFactory, DatasetVersionFactory
from tests.rendered import form_of
from tests.tools import asgi_console

FORM = {"name": "", "image": "pytorch", "node_spec": "nano", "hours": "2", "idle_minutes": "20", "ceiling": ""}
HTMX = {"HX-Request": "true"}


@pytest.fixture
def notebook(customer):
    """The attempt of a notebook that runs on the fake cluster."""
    return sell_notebook(customer)


def test_a_notebook_is_bought_once_from_a_workspace_and_offered_again(owner_page, customer):
    name = customer.workspace.name
    new = f"{reverse('notebook_new')}?workspace={name}"
    assert new in owner_page.get(reverse("workspace_detail", args=[name])).text
    assert 'id="notebook-form"' in owner_page.get(new).text
    card = owner_page.post(reverse("notebook_quote"), FORM | {"workspace": name}, headers=HTMX).text
    assert "2 h" in card
    order = {field: re.search(rf'name="{field}" value="([^"]+)"', card)[1] for field in ("quote", "idempotency_key")}
    addresses = {owner_page.post(reverse("notebook_order"), order)["HX-Redirect"] for _twice in range(2)}
    job = Job.objects.get()
    assert addresses == {reverse("job_detail", args=[job.pk])}
    # The argument is the idle time in seconds, the deadline the two hours.
    assert (job.name, job.nodes, job.arguments, job.on_hang, job.deadline_seconds) == (
        name, 1, ["1200"], "ignore", 7200,
    )  # fmt: skip
    # Two hours of a node, and nothing for epochs: a notebook has none.
    assert [line["rule"] for line in job.order.quote.lines] == ["time_used"]
    page = owner_page.get(addresses.pop()).text
    assert "Ends when idle for" in page
    assert "Epochs" not in page
    for tab in ("overview", "logs", "nodes", "events", "cost", "configuration"):
        assert owner_page.get(reverse("job_detail", args=[job.pk]), {"tab": tab}).status_code == HTTPStatus.OK
    assert reverse("job_detail", args=[job.pk]) in owner_page.get(reverse("notebook_list")).text
    Job.objects.update(state="running")
    jobs = owner_page.get(reverse("job_list")).text
    assert (f"{name}/<" in jobs, "epoch" in jobs.split('id="job-rows"')[-1]) == (False, False), "it has no script"
    Job.objects.update(state="queued")
    again = form_of(owner_page.get(reverse("notebook_new"), {"again": job.pk}).text)
    assert (again["hours"], again["idle_minutes"]) == (["2"], ["20"])


def test_a_notebook_that_is_bought_again_has_the_same_times(owner_page, customer):
    bought = sell_notebook(customer, max_seconds=1200, idle_seconds=100)  # neither is a round number of units
    page = owner_page.get(reverse("notebook_new"), {"again": bought.job_id}).text
    assert "data-discount" not in page  # a notebook has one node
    form = form_of(page)
    card = owner_page.post(reverse("notebook_quote"), form, headers=HTMX).text
    assert ('name="quote"' in card, 'data-minimum="5"' in card) == (True, True)
    again = Quote.objects.latest("created_at").purchase
    assert (again["max_seconds"], again["idle_seconds"]) == (1200, 100)


def test_a_failed_job_links_to_a_filled_in_form_for_a_notebook_but_buys_none(owner_page, customer, client):
    dataset = DatasetFactory(organization=customer.organization, name="digits")
    DatasetVersionFactory(dataset=dataset, number=1)
    attempt = customer.started(datasets=["digits"], node_spec="small")
    DatasetVersionFactory(dataset=dataset, number=2)
    customer.backend.output_folder(f"job-{attempt.job_id}").mkdir(parents=True)
    customer.end(attempt, Outcome.CODE_FAILED)
    new = f"{reverse('notebook_new')}?job={attempt.job_id}"
    page = owner_page.get(reverse("job_detail", args=[attempt.job_id])).text
    assert new in page
    assert "The node of this run is gone. A notebook with the same files and a terminal costs" in page
    form = owner_page.get(new).text
    assert f"job #{attempt.job_id} is gone" in form
    assert f'name="inspected_job" inputmode="numeric" value="{attempt.job_id}"' in form
    assert 'value="digits@1" checked' in form  # the version that the job read, not the latest
    assert re.search(r'name="node_spec" value="small"[^>]* checked', form)
    assert (Job.objects.count(), Quote.objects.filter(purchase__has_key="notebook").count()) == (1, 0)
    order = FORM | {"workspace": customer.workspace.name, "inspected_job": attempt.job_id}
    card = owner_page.post(reverse("notebook_quote"), order, headers=HTMX).text
    assert 'name="quote"' in card
    viewer = MembershipFactory(organization=customer.organization, role="viewer")
    client.force_login(viewer.user)
    assert new not in client.get(reverse("job_detail", args=[attempt.job_id])).text
    results.remove(job=Job.objects.get(pk=attempt.job_id), user=None)  # leaves nothing to inspect
    assert 'inputmode="numeric" value=""' in owner_page.get(new).text


def test_a_notebook_of_another_organization_opens_even_if_the_chosen_one_allows_only_to_look(client, notebook):
    chosen = MembershipFactory(role="viewer")
    client.force_login(chosen.user)
    address = reverse("notebook_open", args=[notebook.job_id])
    assert client.get(address).status_code == HTTPStatus.NOT_FOUND
    MembershipFactory(user=chosen.user, organization=notebook.job.organization, role="member")
    answer = client.get(address, follow=True)
    assert (answer.status_code, "This notebook does not run now" in answer.text) == (HTTPStatus.OK, True)


def test_an_error_is_shown_beside_its_field(owner_page, customer):
    for field, changes in (
        ("max_seconds", {"hours": "0"}),
        ("max_seconds", {"hours": "many"}),
        ("max_seconds", {"hours": "1000"}),
        ("idle_seconds", {"idle_minutes": ""}),
        ("ceiling_minor", {"ceiling": "0.01"}),
        ("image", {"image": "no-such"}),
        ("workspace", {"workspace": "no-such"}),
        ("node_spec", {"node_spec": ""}),
        ("datasets", {"datasets": ["no-such"]}),
    ):
        posted = FORM | {"workspace": customer.workspace.name} | changes
        card = owner_page.post(reverse("notebook_quote"), posted, headers=HTMX).text
        assert re.search(rf'id="error-{field}"[^>]*>\s*[^<\s]', card), changes


def test_a_stopped_notebook_costs_its_time_and_a_quote_for_a_training_buys_no_notebook(
    api, customer, notebook, owner_page, settings
):
    client = api(customer.membership)
    shown = client.get(f"/api/v1/notebooks/{notebook.job_id}/").json()
    # No JupyterLab listens, so there is no URL. The idle time is the default.
    assert (shown["state"], shown["url"], shown["idle_seconds"]) == ("running", "", 1800)
    assert [each["id"] for each in client.get("/api/v1/notebooks/").json()["results"]] == [notebook.job_id]
    assert client.post(f"/api/v1/notebooks/{notebook.job_id}/stop/").json()["state"] == "stopping"
    job = customer.end(notebook, Outcome.STOPPED)
    assert (job.state, job.reason) == ("cancelled", "cancelled")
    receipt = client.get(f"/api/v1/jobs/{job.pk}/receipt/").json()
    assert 0 < receipt["total_minor"] <= shown["ceiling_minor"]
    # Its owner ended it as intended, so people do not read that it was cancelled. The codes of the API stay.
    places = {"notebook_list": [], "job_detail": [job.pk], "receipt_detail": [job.order.hold.receipt.pk]}
    for page, arguments in places.items():
        shown_page = owner_page.get(reverse(page, args=arguments)).text
        assert ("Stopped" in shown_page, "Cancelled" in shown_page) == (True, False), page
    # The page of all jobs offers a search for cancelled ones.
    assert re.search(r'data-state="cancelled">(<[^>]+>)*Stopped<', owner_page.get(reverse("job_list")).text)
    assert "The notebook was stopped. You pay" in owner_page.get(reverse("job_detail", args=[job.pk])).text
    events, cost = (owner_page.get(reverse("job_tab", args=[job.pk, name])).text for name in ("events", "cost"))
    assert ("JupyterLab is stopping." in events, "checkpoint" in events) == (True, False)
    assert ("Quoted" in cost, "Estimated cost" in cost) == (True, False)
    assert "A notebook was stopped" in owner_page.get(reverse("notification_list")).text
    assert f"Stopped notebook #{job.pk}" in owner_page.get(reverse("audit_log")).text
    training = client.post("/api/v1/quotes/", customer.form(), format="json").json()["id"]
    quote = client.post("/api/v1/notebooks/quotes/", notebook_form(customer), format="json").json()["id"]
    for address, wrong in (("notebooks", training), ("orders", quote)):
        refused = client.post(f"/api/v1/{address}/", {"quote": wrong}, format="json")
        assert (refused.status_code, list(refused.json()["fields"])) == (HTTPStatus.BAD_REQUEST, ["quote"])
    customer.backend.has_notebooks = False
    with pytest.raises(InvalidInput) as refused:
        notebooks.quote_notebook(membership=customer.membership, data=notebook_form(customer))
    assert list(refused.value.fields) == ["node_spec"]
    settings.NOTEBOOK_URL = ""
    with pytest.raises(NoNotebooks):
        notebooks.quote_notebook(membership=customer.membership, data=notebook_form(customer))


def test_a_running_notebook_is_extended_on_its_page(owner_page, customer, notebook):
    job = reverse("job_detail", args=[notebook.job_id])
    extend = reverse("notebook_extend", args=[notebook.job_id])
    assert extend in owner_page.get(job).text
    quote = reverse("notebook_extend_quote", args=[notebook.job_id])
    assert quote in owner_page.get(extend).text
    held = customer.wallet.held_minor
    card = owner_page.post(quote, {"hours": "1,5"}, headers=HTMX).text
    added = int(re.search(r'data-added="(\d+)"', card)[1])
    # Two hours are held. One and a half are added, and held once they are bought.
    assert (added, customer.wallet.held_minor) == (held * 3 // 4, held)
    order = {field: re.search(rf'name="{field}" value="([^"]+)"', card)[1] for field in ("quote", "idempotency_key")}
    assert {owner_page.post(reverse("notebook_order"), order)["HX-Redirect"] for _twice in range(2)} == {job}
    assert customer.wallet.held_minor == held + added
    page = owner_page.get(job).text
    assert "at most 3 h 30 min in total" in page
    assert re.search(r'Time left</div>\s*<div class="stat-value"[^>]*>(3 h 29 min|3 h 30 min)<', page)
    assert "more are held in the wallet" in owner_page.get(job, {"tab": "events"}).text
    for hours in ("", "0", "1000"):
        card = owner_page.post(quote, {"hours": hours}, headers=HTMX).text
        assert re.search(r'id="error-added_seconds"[^>]*>(.*?)</', card, re.DOTALL)[1].strip()
    customer.end(notebook, Outcome.STOPPED)
    assert owner_page.get(extend).url == job
    assert "Only a running notebook" in owner_page.post(quote, {"hours": "1"}, headers=HTMX).text


def test_a_notebook_becomes_a_script_that_can_be_trained(owner_page, customer):
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {
            "cell_type": "code",
            # The last line begins with %, but is no magic of IPython.
            "source": ["%matplotlib inline\n", "import torch\n", "x = (7\n", "    % 4)"],
            "outputs": [],
        },
        {"cell_type": "code", "source": "%%bash\nls", "outputs": []},
        {"cell_type": "code", "source": "!pip list\nprint(x)", "outputs": []},
    ]
    customer.write("lab/first.ipynb", json.dumps({"cells": cells}))
    address = reverse("workspace_train", args=[customer.workspace.name, "lab/first.ipynb"])
    shown = owner_page.get(reverse("workspace_file", args=[customer.workspace.name, "lab/first.ipynb"]))
    assert address in shown.text
    for _twice in range(2):
        form = owner_page.post(address)
        assert form.url == f"{reverse('training_new')}?workspace={customer.workspace.name}&code_path=lab%2Ffirst.py"
    script = (customer.folder / "lab/first.py").read_text()
    assert [line for line in script.splitlines() if line and not line.startswith("#")] == [
        "import torch", "x = (7", "    % 4)", "print(x)",
    ]  # fmt: skip
    compile(script, "first.py", "exec")
    customer.write("lab/first.py", "mine = 1\n")
    owner_page.post(address)
    assert (customer.folder / "lab/first.py").read_text() == "mine = 1\n"
    customer.write("lab/first.ipynb", "[" * 100_000)  # nested too deeply to be read
    assert owner_page.post(address).url == reverse("workspace_file", args=[customer.workspace.name, "lab/first.ipynb"])


# --- JupyterLab's host ------------------------------------------------------------------------------------------------


class Lab:
    """Listens where JupyterLab does. Records what it gets, and sends headers that must not reach a browser."""

    def __init__(self, path):
        self.path = path
        self.received = []
        self.loop = asyncio.new_event_loop()

    async def serve(self):
        def respond(_connection, request):
            self.received.append((request.path, dict(request.headers.raw_items())))
            if request.headers.get("Upgrade"):
                return None
            headers = Headers(
                [
                    ("Content-Type", "text/html"), ("Set-Cookie", "sessionid=stolen; Path=/; Domain=localhost"),
                    ("Access-Control-Allow-Origin", "*"), ("Alt-Svc", 'h3="evil.example:443"'), ("Content-Length", "2"),
                    ("Content-Security-Policy", "frame-ancestors *"), ("Clear-Site-Data", '"*"'),
                ]
            )  # fmt: skip
            if "/away" in request.path:
                headers["Location"] = urlsplit(request.path).query.replace("TAB", "\t")
                return Response(302, "Found", headers, b"ok")
            if "/near" in request.path:
                headers["Location"] = "/lab/tree"
                return Response(302, "Found", headers, b"ok")
            return Response(200, "OK", headers, b"ok")

        async def echo(websocket):
            async for message in websocket:
                await websocket.send(message)

        async with unix_serve(echo, str(self.path), process_request=respond) as server:
            self.stop = server.close
            await server.wait_closed()

    @contextmanager
    def running(self):
        thread = threading.Thread(target=lambda: self.loop.run_until_complete(self.serve()))
        thread.start()
        try:
            while not self.path.exists():
                threading.Event().wait(0.01)
            yield self
        finally:
            self.loop.call_soon_threadsafe(self.stop)
            thread.join()
            self.loop.close()


@pytest.fixture
def lab(notebook, customer, short_folders, monkeypatch):
    """A Lab on the notebook's socket, whose path must be short."""
    folder = short_folders()
    monkeypatch.setattr(customer.backend, "run_folder", lambda _name: folder)
    (folder / "run").mkdir(parents=True)
    with Lab(folder / "run" / SOCKET).running() as listening:
        yield listening


@pytest.fixture
def browsers(lab, notebook, settings):
    """`browsers(membership)` is a Browser, at a console that is served."""
    with asgi_console() as url:
        settings.NOTEBOOK_URL = f"http://localhost:{urlsplit(url).port}"
        settings.TRAINYARD_URL = url
        opened = []

        def browser(membership, job=notebook.job_id):
            opened.append(Browser(url, membership, job))
            return opened[-1]

        yield browser
        for each in opened:
            each.http.close()


@pytest.mark.django_db(transaction=True)
class TestHost:
    """Requests to a notebook's host name, which the web server forwards to JupyterLab."""

    @pytest.fixture
    def customer(self, transactional_db, customer):
        """The customer, committed to the database: the server reads it in other threads."""
        return customer

    def test_a_member_enters_with_a_ticket_and_nothing_of_the_console_passes(self, browsers, customer, lab):
        browser = browsers(customer.membership)
        entered = browser.enter()
        assert (entered.status_code, entered.headers["location"]) == (HTTPStatus.SEE_OTHER, "/lab")
        assert "HttpOnly" in entered.headers["set-cookie"]
        assert "Domain" not in entered.headers["set-cookie"]
        page = browser.ask("/lab?x=%2F..&y=1", Authorization="Token ty_secret", **{"X-CSRFToken": "secret"})
        assert (page.status_code, page.text) == (HTTPStatus.OK, "ok")
        assert set(page.headers) - {"date", "server"} == {
            "content-type", "content-length", "content-security-policy", "x-content-type-options", "referrer-policy",
            "cross-origin-opener-policy", "cross-origin-resource-policy",
        }  # fmt: skip
        assert page.headers["content-security-policy"] == "frame-ancestors 'self'"
        ((path, headers),) = lab.received
        assert path == "/lab?x=%2F..&y=1"
        assert headers["host"] == browser.host
        assert not {"cookie", "authorization", "x-csrftoken"} & {name.lower() for name in headers}
        assert browser.ask("/near").headers["location"] == "/lab/tree"
        for place in ("//evil.example/", "/\\evil.example/", "/TAB/evil.example/", "https://evil.example/", "evil"):
            assert browser.ask(f"/away?{place}").status_code == HTTPStatus.BAD_GATEWAY, place

    def test_only_a_members_browser_with_its_cookie_is_admitted_and_only_from_the_same_origin(
        self, browsers, customer, stranger, lab, notebook
    ):
        mine = browsers(customer.membership)
        ticket = mine.ticket()
        mine.enter(ticket)
        viewer = MembershipFactory(organization=customer.organization, role="viewer")
        for other in (stranger, viewer):
            assert browsers(other).ticket() == ""
        assert browsers(customer.membership).ask().status_code == HTTPStatus.FORBIDDEN  # without the cookie
        foreign = browsers(customer.membership, notebook.job_id + 1)  # at the host of another notebook
        assert foreign.enter(ticket).status_code == HTTPStatus.FORBIDDEN
        foreign.cookie = mine.cookie
        assert foreign.ask().status_code == HTTPStatus.FORBIDDEN
        forged = browsers(customer.membership)
        for value in (ticket.partition("ticket=")[2], "x", "", "é"):
            forged.cookie = f"{gateway.COOKIE}={value}"
            assert forged.ask(Cookie=forged.cookie.encode()).status_code == HTTPStatus.FORBIDDEN
        as_ticket = f"/trainyard-enter?ticket={mine.cookie.partition('=')[2]}"
        assert mine.ask(as_ticket).status_code == HTTPStatus.FORBIDDEN
        # Only the server itself asks Django at this path who is admitted.
        assert mine.http.get(gateway.GATE_PATH).status_code == HTTPStatus.NOT_FOUND
        for name, value in {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}.items():
            assert mine.ask("/api/contents", method="POST", **{name: value}).status_code == HTTPStatus.FORBIDDEN
        assert mine.ask(**{"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}).status_code == HTTPStatus.FORBIDDEN
        assert lab.received == []
        same_origin = {"Origin": f"http://{mine.host}", "Sec-Fetch-Site": "same-origin"}
        assert mine.ask("/api/contents", method="POST", **same_origin).status_code == HTTPStatus.OK
        membership, organization = customer.membership, customer.organization
        for row, name, value in ((membership, "role", "viewer"), (organization, "requires_second_factor", True)):
            allowed = getattr(row, name)
            setattr(row, name, value)
            row.save()
            assert mine.ask().status_code == HTTPStatus.FORBIDDEN
            setattr(row, name, allowed)
            row.save()
            assert mine.ask().status_code == HTTPStatus.OK
        mine.session.logout()
        assert mine.ask().status_code == HTTPStatus.FORBIDDEN

    def test_a_link_or_pipe_in_place_of_the_socket_is_not_opened(self, browsers, customer, lab, short_folders):
        browser = browsers(customer.membership)
        browser.enter()
        # Customer code could replace the socket by a link to another socket of this machine.
        elsewhere = short_folders() / "console.sock"
        lab.path.rename(elsewhere)
        lab.path.symlink_to(elsewhere)
        assert browser.ask().status_code == HTTPStatus.FORBIDDEN
        # The server checks again, because customer code could put the link there after Django's check.
        with pytest.raises(gateway.Refused), gate.verified_socket(lab.path):
            pass
        lab.path.unlink()
        os.mkfifo(lab.path)
        assert browser.ask().status_code == HTTPStatus.FORBIDDEN
        lab.path.unlink()
        elsewhere.rename(lab.path)
        assert browser.ask().status_code == HTTPStatus.OK

    @pytest.mark.parametrize("attack", ["pings without reading", "empty fragments"])
    def test_a_websocket_that_fills_the_memory_is_cut_off(self, browsers, customer, attack, monkeypatch):
        monkeypatch.setattr(websocket_protocol, "MAX_UNSENT_BYTES", 1024**2)
        browser = browsers(customer.membership)
        browser.enter()
        lines = [
            "GET /api/kernels/1/channels HTTP/1.1", f"Host: {browser.host}", f"Origin: http://{browser.host}",
            f"Cookie: {browser.cookie}", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "", "",
        ]  # fmt: skip
        mask = bytes(4)
        ping = b"\x89\xfd" + mask + bytes(125)
        start_of_message, fragment = b"\x01\x80" + mask, b"\x00\x80" + mask
        with socket.create_connection(("127.0.0.1", browser.port), timeout=60) as client:
            client.sendall("\r\n".join(lines).encode())
            assert b" 101 " in client.recv(4096)
            client.sendall(b"" if attack == "pings without reading" else start_of_message)
            frames = (ping if attack == "pings without reading" else fragment) * 500
            count = 40 * 1024**2 // len(frames)  # several times what the sockets' buffers hold
            with pytest.raises(OSError, match=r"reset|pipe"):
                client.sendall(frames * count)

    def test_websockets_pass_from_the_same_origin_with_the_cookie_until_the_member_logs_out(
        self, browsers, customer, lab, monkeypatch
    ):
        monkeypatch.setattr(gateway, "CHECK_SECONDS", 0.05)
        browser = browsers(customer.membership)
        browser.enter()
        without_cookie = browsers(customer.membership)
        console = f"http://127.0.0.1:{browser.port}"
        attempts = [
            lambda: browser.websocket(origin="http://evil.example"),
            lambda: browser.websocket(origin=console),
            without_cookie.websocket,
            # At the console's own host, which has no websocket at this path.
            lambda: connect(f"{console.replace('http', 'ws')}/api/v1/jobs/", origin=console, proxy=None),
        ]

        async def open_one(attempt):
            async with attempt():
                pass

        for attempt in attempts:
            with pytest.raises(InvalidStatus) as refused:
                asyncio.run(open_one(attempt))
            assert refused.value.response.status_code == HTTPStatus.FORBIDDEN
        assert lab.received == []

        async def talk():
            async with browser.websocket() as websocket:
                await websocket.send("text")
                await websocket.send(b"bytes")
                received = [await websocket.recv(), await websocket.recv()]
                await asyncio.to_thread(browser.log_out)
                with pytest.raises(ConnectionClosed) as closed:
                    await websocket.recv()
            return received, closed.value.rcvd.code

        assert asyncio.run(talk()) == (["text", b"bytes"], gateway.NOT_ADMITTED)
