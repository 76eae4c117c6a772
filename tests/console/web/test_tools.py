"""Tools through the console: who reaches one, and which requests and headers pass between it and a browser.

`tests/browser/test_tensorboard.py` has a real TensorBoard.
"""

import os
import shutil
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingUnixStreamServer

import httpx
import pytest
from django.core.management import call_command
from django.urls import reverse

from console.accounts.models import Membership
from console.core.errors import InvalidInput
from jobs import tensorboards
from jobs.models import Attempt
from runtime.tools import control, owner
from tests.console.processes import wait_for
from tests.factories.accounts import MembershipFactory, logged_in
from tests.tools import asgi_console, owner_of_tools, write_scalars

pytestmark = pytest.mark.django_db(transaction=True)
LISTING = """
import os, socket, sys
from http.server import BaseHTTPRequestHandler
from socketserver import UnixStreamServer

class Handler(BaseHTTPRequestHandler):
    def address_string(self): return ""  # for the log: clients of a Unix socket have no address
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(" ".join(os.listdir(sys.argv[2])).encode())

server = UnixStreamServer("", Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[1]))
server.serve_forever()
"""
"""A tool that lists the runs that it sees. It starts at once, unlike TensorBoard."""


@pytest.fixture
def root(short_folders, monkeypatch, tmp_path):
    """The folder of the tools' owner. Its tools are the program LISTING."""
    (tmp_path / "listing.py").write_text(LISTING)
    monkeypatch.setattr(owner, "PROGRAM", tmp_path / "listing.py")
    folder = short_folders()
    monkeypatch.setattr(tensorboards, "tools_folder", lambda: folder)
    return folder


def visit(url, membership=None, **headers):
    """Return an HTTP client in place of a browser, with a session of the member if there is one."""
    client = httpx.Client(base_url=url, headers=headers, timeout=60)
    if membership is not None:
        client.cookies.set("sessionid", logged_in(membership.user).cookies["sessionid"].value)
    return client


@pytest.fixture
def job(customer):
    """A running job with event files for TensorBoard."""
    attempt = customer.started()
    write_scalars(customer.backend.run_folder(attempt.run_name) / "run" / "tensorboard")
    return attempt.job


def test_only_the_member_who_opened_it_reaches_a_tensorboard(root, customer, job, stranger, api):
    colleague = MembershipFactory(organization=customer.organization, role="owner")
    with owner_of_tools(root), asgi_console() as url:
        client = api(customer.membership)
        answer = client.post(f"/api/v1/jobs/{job.pk}/tensorboard/")
        assert answer.status_code == 201, answer.content
        path = httpx.URL(answer.json()["url"]).path
        key = path.split("/")[2]
        assert client.post(f"/api/v1/jobs/{job.pk}/tensorboard/").json()["url"].endswith(path)
        assert api(stranger).post(f"/api/v1/jobs/{job.pk}/tensorboard/").status_code == 404
        browser = logged_in(stranger.user)
        listed = browser.post(reverse("jobs_tensorboard"), {"job": [job.pk]})
        assert listed.url == reverse("job_list")  # nothing to show
        with pytest.raises(InvalidInput, match="at most 20 jobs"):
            tensorboards.open_session(membership=customer.membership, jobs=[job] * 21)

        with visit(url, customer.membership) as mine:
            runs = mine.get(path)
            # LISTING shows a folder for each run: its job's id, a dash and its name.
            assert (runs.status_code, runs.text.partition("-")[0]) == (200, str(job.pk))
            elsewhere = {"Sec-Fetch-Site": "cross-site"}
            assert mine.post(f"{path}data/runs", headers=elsewhere).status_code == 403
            assert mine.request("PUT", path).status_code == 405
        # 404: the session is not theirs. 400: the path is unsafe. 302: to log in, or to create an organization.
        with visit(url, colleague) as other, visit(url, stranger) as foreign, visit(url) as nobody:
            token = {"Authorization": client._credentials["HTTP_AUTHORIZATION"]}
            for guess in (key, key.swapcase(), "A" * 16, "x", f"x%2f..%2f{key}", "x" * 5000):
                for below in ("", "data/runs", f"%2e%2e/{key}/data/runs"):
                    address = f"/tools/{guess}/{below}"
                    for guessing in (other, foreign):
                        assert guessing.get(address).status_code in {400, 404}, address
                    for headers in ({}, token):  # a token is for the API only
                        assert nobody.get(address, headers=headers).status_code in {302, 400, 404}, address
        Membership.objects.filter(pk=customer.membership.pk).delete()
        with visit(url, customer.membership) as former:
            assert former.get(f"{path}data/runs").status_code in {302, 404}
    # A member again. The TensorBoard has ended with its owner.
    MembershipFactory(organization=customer.organization, user=customer.membership.user)
    with asgi_console() as url, visit(url, customer.membership) as late:
        ended = late.get(f"{path}data/runs")
        assert (ended.status_code, "This TensorBoard has ended." in ended.text) == (404, True)


class HostileTool(BaseHTTPRequestHandler):
    """Records what it gets, and sends headers that must not reach a browser."""

    received: list = []

    def address_string(self):
        return ""

    def log_message(self, *_arguments):
        pass

    def do_GET(self):
        self.received.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        if "redirect" in self.path:
            self.send_response(302)
            self.send_header("Location", "/organization/")
        elif "unchanged" in self.path:
            self.send_response(304)
            self.send_header("Location", "/organization/")
        else:
            self.send_response(200)
            media_type = "text/html" if self.path.split("?")[0].endswith(".html") else "text/javascript"
            self.send_header("Content-Type", media_type)
        for name, value in (
            ("Set-Cookie", "sessionid=stolen; Path=/"), ("Content-Security-Policy", "script-src *"),
            ("Clear-Site-Data", '"*"'), ("Access-Control-Allow-Origin", "*"), ("Service-Worker-Allowed", "/"),
            ("Link", "</x.js>; rel=preload"), ("Refresh", "0; url=/organization/"), ("Content-Length", "2"),
            ("Accept-Ranges", "\xe8\xae\xad"),  # sent as these bytes, which are a Chinese character in UTF-8
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"ok")


@pytest.fixture
def hostile_tool(root, customer):
    """The path of a session whose tool is HostileTool."""
    key = "hostilehostileAB"  # as long as a generated key, 16 characters
    folder = root / control.SESSIONS_FOLDER / key
    folder.mkdir(parents=True)
    record = f'{{"organization": {customer.organization.pk}, "user": {customer.membership.user_id}}}'
    (folder / control.RECORD).write_text(record)
    HostileTool.received = []
    with ThreadingUnixStreamServer(str(folder / control.SOCKET), HostileTool) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"/tools/{key}/"
        server.shutdown()
        thread.join()
    (folder / control.SOCKET).unlink()


def test_no_secret_reaches_a_tool_and_no_hostile_header_comes_back(hostile_tool, root, customer):
    path = hostile_tool
    secrets = {"X-CSRFToken": "secret", "Referer": "http://secret/", "X-Other": "1"}
    with asgi_console() as url, visit(url, customer.membership, **secrets) as browser:
        page = browser.get(f"{path}a.html?x=%2F..&y=1")
        data = browser.get(f"{path}data/evil.html")
        script = browser.get(f"{path}experiment/x/d%61ta/evil.js")  # d%61ta is "data"
        redirected = browser.get(f"{path}redirect")
        unchanged = browser.get(f"{path}unchanged")
        secrets_sent = browser.get(f"{path}b.html", headers={"Authorization": "Basic c2VjcmV0"})
        sent = len(HostileTool.received)
        for trick in ("../x", "a/../../x", "a%2f..%2fx", "%2e%2e/x", "a//b", "a%5cb", "a%00", ".", "a/.."):
            with socket.create_connection(httpx.URL(url).netloc.decode().split(":")) as raw:
                cookie = f"sessionid={browser.cookies['sessionid']}"
                raw.sendall(f"GET {path}{trick} HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookie}\r\n\r\n".encode())
                assert raw.recv(65536).split()[1] in {b"404", b"400"}, trick
        assert len(HostileTool.received) == sent
        address = root / control.SESSIONS_FOLDER / path.split("/")[2] / control.SOCKET
        hidden = address.rename(address.with_name("hidden"))
        ended = browser.get(path)
        hidden.rename(address)
        tool_url = f"{url}{path}"
    assert (page.status_code, page.text, redirected.status_code) == (200, "ok", 502)
    assert redirected.json()["code"] == "tool_redirects"
    assert (unchanged.status_code, unchanged.content, "location" in unchanged.headers) == (304, b"", False)
    assert (ended.status_code, ended.json()["code"]) == (502, "tool_ended")
    assert HostileTool.received[0][0] == f"{path}a.html?x=%2F..&y=1"
    for _path, headers in HostileTool.received:
        assert set(headers) <= {"host", "accept", "accept-encoding", "connection"}
        assert headers["host"] == "localhost"
        assert "secret" not in str(headers)
    for answer in (page, data, script, secrets_sent):
        assert set(answer.headers) - {"server"} == {
            "accept-ranges", "content-length", "content-type", "content-security-policy", "x-content-type-options",
            "x-frame-options", "referrer-policy", "cross-origin-opener-policy", "cross-origin-resource-policy",
            "cache-control", "date",
        }  # fmt: skip
        policy = answer.headers["content-security-policy"]
        assert f"script-src {tool_url};" in policy
        assert f"connect-src {tool_url};" in policy
        assert "'self'" not in policy
        assert "unsafe-eval" not in policy
    assert page.headers["content-type"] == "text/html"  # of the tool; what is below data/ comes from customers
    assert {data.headers["content-type"], script.headers["content-type"]} == {"application/octet-stream"}


def test_the_command_serves_until_sigterm(root):
    def terminate():
        wait_for((root / control.CONTROL_SOCKET).exists)
        os.kill(os.getpid(), signal.SIGTERM)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    thread = threading.Thread(target=terminate)
    thread.start()
    try:
        call_command("run_tools")
    finally:
        thread.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not (root / control.CONTROL_SOCKET).exists()


@pytest.mark.usefixtures("root")
def test_the_latest_attempts_of_a_job_are_shown(customer, job, monkeypatch):
    for number in (2, 3):
        Attempt.objects.create(
            job=job, number=number, backend=job.attempts.first().backend, granted_nodes=2,
            claimed_at=job.queued_at, started_at=job.queued_at,
        )  # fmt: skip
        write_scalars(customer.backend.run_folder(f"job-{job.pk}-{number}") / "run" / "tensorboard")
    requests = []
    monkeypatch.setattr(tensorboards.control, "start", lambda _folder, request: requests.append(request) or "key")
    for most, shown in ((3, [1, 2, 3]), (2, [2, 3])):
        monkeypatch.setattr(tensorboards, "MAX_ATTEMPTS", most)
        tensorboards.open_session(membership=customer.membership, jobs=[job])
        assert [log.name for log in requests.pop().logs] == [f"{job.pk}-train.py-attempt-{each}" for each in shown]


@pytest.mark.usefixtures("root")
def test_missing_and_unreadable_logs_are_refused_with_a_reason(customer, monkeypatch, api):
    attempt = customer.started()
    client, address = api(customer.membership), f"/api/v1/jobs/{attempt.job_id}/tensorboard/"
    shutil.rmtree(customer.backend.run_folder(attempt.run_name))  # as clean-up does once the retention has ended
    assert client.post(address).json()["code"] == "no_logs"
    write_scalars(customer.backend.run_folder(attempt.run_name) / "run" / "tensorboard")
    assert client.post(address).json()["code"] == "tools_away"  # no process of the tools runs here
    monkeypatch.setattr(type(customer.backend), "shares_storage", False)
    assert client.post(address).json()["code"] == "logs_unreachable"
    browser = logged_in(customer.membership.user)
    page = browser.post(reverse("job_tensorboard", args=[attempt.job_id]), follow=True)
    assert "can’t read" in page.text or "can&#x27;t read" in page.text
