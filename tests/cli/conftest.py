"""The program `trainyard`, whose requests Django answers in this process."""

from __future__ import annotations

import json

import httpx
import pytest
from click.testing import CliRunner
from django.test import Client as Browser

from cli.client import Client
from cli.credentials import Console
from cli.main import main
from cli.session import Session
from cli.transport import Transport
from console.accounts import services as accounts

URL = "https://testserver"


def client_of(answer):
    """Return a client of a console that gives `answer(request)`. It never pauses."""
    transport = httpx.MockTransport(answer)
    return Client(
        Transport(Console("https://console.example.com", "secret"), transport=transport, pause=lambda _seconds: None)
    )


def answer_with_django(request):
    """Answer a request of the program as the console does."""
    answer = Browser(raise_request_exception=True).generic(
        request.method,
        request.url.raw_path.decode(),
        data=request.read(),
        content_type=request.headers.get("Content-Type", ""),
        headers={name: value for name, value in request.headers.items() if not name.startswith("content-")},
        secure=True,
    )
    return httpx.Response(answer.status_code, headers=dict(answer.items()), content=b"".join(answer))


class Shell:
    """Runs commands of the program with a home folder for the test. `pauses` records the pauses; none is made."""

    def __init__(self, home, **environment):
        self.environment = {"XDG_CONFIG_HOME": str(home / "config"), "XDG_STATE_HOME": str(home / "state")}
        self.environment |= environment
        self.http = None
        self.is_interactive = False
        self.pauses = []

    def __call__(self, *words, status=0, text=None):
        """Run a command that ends with `status` and is given `text` as input; return what it printed.

        Statuses: 1 an error, 2 a wrong option, 3 the job failed, 4 it was cancelled, 5 it costs more than allowed.
        """
        session = Session(environment=self.environment, http=self.http, pause=self.pauses.append)
        session.is_interactive = lambda: self.is_interactive
        done = CliRunner().invoke(main, [str(word) for word in words], obj=session, input=text)
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == status, done.output
        self.stdout, self.stderr = done.stdout, done.stderr
        return self.stdout

    def json(self, *words, **options):
        """Run a command with --json; return the one document on the standard output."""
        end = words.index("--") if "--" in words else len(words)
        return json.loads(self(*words[:end], "--json", *words[end:], **options))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project's folder, which is the working directory. Its names have characters that URLs must escape."""
    folder = tmp_path / "Mein Projekt"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "data").mkdir()
    (folder / "data" / "a b#%?ä.txt").write_bytes(b"a")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def shell(customer, home):
    """The program, logged in as a customer who can buy."""
    _row, token = accounts.create_token(membership=customer.membership, name="laptop")
    shell = Shell(home, TRAINYARD_URL=URL, TRAINYARD_TOKEN=token)
    shell.http = httpx.MockTransport(answer_with_django)
    return shell
