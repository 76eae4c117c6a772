"""deploy/jupyterhub on a real JupyterHub from PyPI: log-in with the console, a server that it runs and bills, its stop.

JupyterHub gets an environment of its own in var/jupyterhub, once. Where it cannot be installed the test is skipped.
"""

import hashlib
import html
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from urllib.parse import urlsplit

import httpx
import pytest

from tests.console.processes import free_port, wait_for
from tests.flows import WHOLE_CONSOLE
from tests.flows.console import PASSWORD, ROOT, Buyer

pytestmark = [*WHOLE_CONSOLE, pytest.mark.slow, pytest.mark.torch]
PACKAGES = ["jupyterhub==6.1.1", "oauthenticator==17.4.0"]
PROXY = "configurable-http-proxy@5.3.0"
SOURCE = ROOT / "deploy" / "jupyterhub"
HOME = ROOT / "var" / "jupyterhub"
PATIENCE_SECONDS = 120
CONFIG = """
load_subconfig({example!r})
c.JupyterHub.bind_url = "{url}"
c.JupyterHub.hub_port = {hub_port}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_port}"
c.ConfigurableHTTPProxy.command = ["node", {proxy!r}]
c.TrainyardSpawner.redirect_port = {redirect_port}
c.TrainyardSpawner.poll_interval = 1
c.TrainyardSpawner.profiles = [{{"name": "Small", "image": "pytorch", "node_spec": "nano", "max_seconds": 3600}}]
"""
REGISTER = """
from allauth.idp.oidc.models import Client
from console.accounts.openid import GRANT_TYPES, SCOPES
client = Client(name="Hub", redirect_uris="{callback}", scopes="\\n".join(SCOPES))
client.set_grant_types([grant.value for grant in GRANT_TYPES])
client.set_secret("{secret}")
client.save()
print("client", client.pk)
"""
EXPIRE = "from allauth.idp.oidc.models import Token; print(Token.objects.filter(type='at').delete())"
"""Deletes all access tokens, so that the hub must refresh its own."""


@pytest.fixture(scope="module")
def installed():
    """The environment with JupyterHub, its proxy and our package."""
    wanted = "\n".join([*PACKAGES, PROXY, str(SOURCE), (SOURCE / "pyproject.toml").read_text(), sys.version])
    mark = HOME / f"installed-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"
    if not mark.exists():
        shutil.rmtree(HOME, ignore_errors=True)
        python = HOME / "venv" / "bin" / "python"
        steps = [
            [sys.executable, "-m", "venv", "--without-pip", HOME / "venv"],
            [sys.executable, "-m", "runtime.images.uv", "pip", "install", "--python", python, *PACKAGES, "-e", SOURCE],
            ["npm", "install", "--prefix", HOME, "--ignore-scripts", "--no-audit", "--no-fund", "--silent", PROXY],
        ]
        for step in steps:
            try:
                subprocess.run(step, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"JupyterHub cannot be installed here: {error}: {getattr(error, 'stderr', '')}")
        mark.touch()
    return HOME


class Hub:
    """A JupyterHub process, and a person's browser that is logged in to the console."""

    def __init__(self, installed: Path, console, folder: Path, buyer: Buyer) -> None:
        self.installed, self.console, self.folder = installed, console, folder
        self.url = f"http://127.0.0.1:{free_port()}"
        callback, secret = f"{self.url}/hub/oauth_callback", secrets.token_urlsafe()
        shown = console.manage("shell", "-c", REGISTER.format(callback=callback, secret=secret))
        self.environment = {
            "PATH": os.environ["PATH"],
            "TRAINYARD_URL": console.url,
            "OAUTH_CLIENT_ID": re.search(r"client (\w+)", shown.stdout)[1],
            "OAUTH_CLIENT_SECRET": secret,
            "OAUTH_CALLBACK_URL": callback,
            "JUPYTERHUB_CRYPT_KEY": secrets.token_hex(32),
            "ALLOWED_ORGANIZATIONS": buyer.call("GET", "organization/")["slug"],
        }
        config = CONFIG.format(
            example=str(SOURCE / "jupyterhub_config.py"), url=self.url, hub_port=free_port(), proxy_port=free_port(),
            redirect_port=free_port(), proxy=str(installed / "node_modules" / ".bin" / "configurable-http-proxy"),
        )  # fmt: skip
        (folder / "config.py").write_text(config)
        self.browser = httpx.Client(follow_redirects=True, timeout=60)
        page = self.browser.get(f"{console.url}/accounts/login/")
        self._post(page, f"{console.url}/accounts/login/", login=buyer.email, password=PASSWORD)

    def up(self) -> None:
        """Start the hub, and wait until it responds through its proxy."""
        command = [self.installed / "venv" / "bin" / "jupyterhub", "-f", "config.py"]
        with (self.folder / "hub.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=log, stderr=log)
        wait_for(lambda: self.process.poll() is not None or self._is_up(), PATIENCE_SECONDS)
        assert self.process.poll() is None, self.log()

    def down(self) -> None:
        """Stop the hub; its notebooks go on."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)

    def log(self) -> str:
        return (self.folder / "hub.log").read_text()[-6000:]

    def log_in(self) -> str:
        """Log in through the console. Return the name of the hub's user."""
        consent = self.browser.get(f"{self.url}/hub/oauth_login")
        assert "Log in to Hub" in consent.text, self.log()
        fields = re.findall(r'<input type="hidden" name="(request|scopes)" value="([^"]*)"', consent.text)
        self._post(
            consent,
            f"{self.console.url}/identity/o/authorize",
            request=html.unescape(dict(fields)["request"]),
            scopes=[value for name, value in fields if name == "scopes"],
            action="grant",
        )
        return str(self.api("GET", "user")["name"])

    def api(self, method: str, path: str) -> dict:
        """Call the hub's API as its own pages do."""
        headers = {"X-XSRFToken": self._xsrf(), "Referer": f"{self.url}/hub/home"}
        response = self.browser.request(method, f"{self.url}/hub/api/{path}", headers=headers)
        assert response.status_code < 400, f"{response.text}\n{self.log()}"
        return response.json() if response.content else {}

    def spawn(self, **options: str) -> None:
        """Post the form that starts a server."""
        form = self.browser.get(f"{self.url}/hub/spawn")
        assert 'name="workspace"' in form.text, form.text
        address = f"{self.url}/hub/spawn?_xsrf={self._xsrf()}"
        # Do not follow: if the server starts fast, the response already redirects to JupyterLab.
        self.browser.post(address, data=options, follow_redirects=False)

    def page(self, path: str) -> str:
        """Return the text of a page of the hub."""
        return self.browser.get(f"{self.url}/hub/{path}").text

    def target(self, user: str) -> str:
        """Where the server's address leads; empty while it is not ready."""
        response = self.browser.get(f"{self.url}/user/{user}/lab", follow_redirects=False)
        target = response.headers.get("location", "")
        return target if target.startswith(self.console.url) else ""

    def _is_up(self) -> bool:
        try:
            return self.browser.get(f"{self.url}/hub/api/").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _xsrf(self) -> str:
        self.browser.get(f"{self.url}/hub/home")
        return next(cookie.value for cookie in self.browser.cookies.jar if cookie.name == "_xsrf")

    def _post(self, page: httpx.Response, url: str, **form) -> None:
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)[1]
        response = self.browser.post(url, data={"csrfmiddlewaretoken": token} | form, headers={"Referer": url})
        assert response.status_code == httpx.codes.OK, f"{response.url}: {response.text}"


@pytest.fixture
def hub(installed, console, buyer, tmp_path):
    running = Hub(installed, console, tmp_path, buyer)
    try:
        running.up()
        yield running
    finally:
        running.down()
        running.browser.close()
        buyer.started += [each["id"] for each in open_notebooks(buyer)]  # cancelled after the test


def open_notebooks(buyer):
    return [each for each in buyer.call("GET", "notebooks/")["results"] if each["finished_at"] is None]


def test_a_server_of_the_hub_is_a_notebook_that_the_console_bills(hub, console, buyer):
    user = hub.log_in()
    hub.spawn(workspace="no-such")
    wait_for(lambda: "workspace: This object does not exist" in hub.page(f"spawn-pending/{user}"), PATIENCE_SECONDS)
    hub.spawn(workspace="main")
    target = wait_for(lambda: hub.target(user), PATIENCE_SECONDS)
    (notebook,) = open_notebooks(buyer)
    job = notebook["id"]
    assert (notebook["state"], notebook["workspace"], notebook["node_spec"]) == ("running", "main", "nano")
    opened = hub.browser.get(target, follow_redirects=False).headers["location"]
    assert urlsplit(opened).hostname == f"n{job}.localhost"

    hub.down()
    assert buyer.job(job)["state"] == "running"
    console.manage("shell", "-c", EXPIRE)
    hub.up()
    assert wait_for(lambda: hub.target(user), PATIENCE_SECONDS) == target
    assert hub.api("GET", "user")["servers"][""]["ready"]  # the user's server without a name

    hub.down()
    (hub.folder / "jupyterhub.sqlite").unlink()  # a hub that lost its database takes over the open notebook
    hub.up()
    assert hub.log_in() == user
    hub.spawn(workspace="main")
    assert wait_for(lambda: hub.target(user), PATIENCE_SECONDS) == target
    assert [each["id"] for each in open_notebooks(buyer)] == [job]

    hub.api("DELETE", f"users/{user}/server")
    ended = buyer.ended(job)
    assert (ended["state"], ended["reason"]) == ("cancelled", "cancelled")
    assert 0 < buyer.bill(job)["total_minor"] <= notebook["ceiling_minor"]
    wait_for(lambda: hub.api("GET", "user")["servers"] == {}, PATIENCE_SECONDS)

    hub.spawn(workspace="main")
    wait_for(lambda: hub.target(user), PATIENCE_SECONDS)
    (notebook,) = open_notebooks(buyer)
    buyer.call("POST", f"notebooks/{notebook['id']}/stop/")  # at the console: the hub notices it
    wait_for(lambda: hub.api("GET", "user")["servers"] == {}, PATIENCE_SECONDS)


@contextmanager
def console_that_answers(answers):
    """Yield the address of a console that gives the raw `answers` by path; any other closes the connection.

    Those in a list are given in turn.
    """

    class Handler(BaseRequestHandler):
        def handle(self):
            path = self.request.recv(65536).split()[1].decode().removeprefix("/api/v1/notebooks/")
            given = answers.get(path, b"")
            self.request.sendall(given.pop(0) if isinstance(given, list) else given)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def answer(body, status="200 OK"):
    """Return a raw HTTP response."""
    text = body if isinstance(body, str) else json.dumps(body)
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def call_spawners(installed, calls):
    """Call a method of a spawner with the notebook 7 for each (console's answers, method, options).

    Return the result and the spawner's notebook of each. One process makes all calls: its imports take two seconds.
    """
    command = [installed / "venv" / "bin" / "python", ROOT / "tests" / "flows" / "hub_spawner.py"]
    with ExitStack() as stack:
        urls = [stack.enter_context(console_that_answers(answers)) for answers, _method, _options in calls]
        arguments = [[url, method, options] for url, (_answers, method, options) in zip(urls, calls, strict=True)]
        done = subprocess.run([*command, json.dumps(arguments)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_server_counts_as_open_while_its_console_cannot_be_reached(installed):
    refused = answer({"code": "not_authenticated", "message": "m"}, "401 Unauthorized")
    statuses = {
        answer({"state": "running"}): None,
        answer({"state": "failed"}): 1,
        answer({"code": "not_found", "message": "m"}, "404 Not Found"): 1,
        refused: None,  # and no token was refreshed
        b"": None,  # the console closes the connection, as when it restarts
        answer("", "302 Found"): None,
        answer("no such host", "404 Not Found"): None,  # a proxy answers for the console
    }
    calls = [({"7/": response}, "poll", {}) for response in statuses]
    refused_calls = ({"7/": refused}, "poll_at_times", {"times": [1, 3601, 3602]})
    *polls, (refusals, _notebook) = call_spawners(installed, [*calls, refused_calls])
    assert dict(zip(statuses, polls, strict=True)) == {response: [status, 7] for response, status in statuses.items()}
    assert refusals == [None, None, 1]  # a log-in that is refused for longer than an hour has ended


def test_a_start_waits_while_the_console_restarts_and_takes_over_its_users_notebook_of_its_profile(installed):
    def notebook(number, profile, state="running", placed_by=1):
        choices = {"workspace": "main", "image": "pytorch", "node_spec": "nano", "url": "u", "placed_by": placed_by}
        queued_at = datetime.now(UTC).isoformat()
        return {"id": number, "name": f"JupyterHub 1 ({profile})", "state": state, "queued_at": queued_at} | choices

    pages = {
        "?page_size=200": {
            "results": [
                *(notebook(number, "Small", placed_by=other) for number, other in ((7, 2), (6, None))),
                notebook(5, "Large size"),
                notebook(4, "Small", state="failed"),
            ],
            "next": "http://other.example.com/?cursor=b",
        },
        "?cursor=b": {"results": [notebook(3, "Small") | {"url": "", "waiting_for": "Waiting"}], "next": None},
    }
    answers = {path: answer(page) for path, page in pages.items()}
    restarting = ("502 Bad Gateway", "429 Too Many Requests", "401 Unauthorized")
    answers["3/"] = [b"", *(answer("busy", status) for status in restarting), answer(notebook(3, "Small"))]
    starts = call_spawners(installed, [(answers, "start", {"profile": profile}) for profile in ("0", "1")])
    assert [notebook for _url, notebook in starts] == [3, 5]
