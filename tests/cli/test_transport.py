"""HTTP of the command line: where the token is sent, which requests are repeated, and what errors are raised."""

import httpx
import pytest

from cli.client import Client
from cli.credentials import Console, Credentials, normalize_url
from cli.errors import ApiError, CliError, UnexpectedAnswer, Unreachable
from cli.transport import MAX_PAUSE_SECONDS, TRIES, Transport
from tests.cli.conftest import Shell

URL = "https://console.example.com"


class Connection:
    """Gives the client these answers in turn; the last is repeated. An exception among them is raised."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests, self.pauses = [], []
        transport = Transport(Console(URL, "ty_secret"), transport=httpx.MockTransport(self), pause=self.pauses.append)
        self.client = Client(transport)

    def __call__(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_an_order_whose_answer_is_lost_is_sent_again_with_its_key():
    order = httpx.Response(201, json={"id": "1", "job": 7})
    line = Connection(httpx.ReadTimeout("lost"), httpx.Response(503, headers={"Retry-After": "5"}), order)
    assert line.client.order("quote").job == 7
    assert [request.headers["Idempotency-Key"] for request in line.requests] == ["trainyard-cli-quote"] * 3
    assert line.pauses == [0.5, 5.0]
    refusal = httpx.Response(402, json={"code": "insufficient_funds", "message": "m"})
    for answer, may_be_bought in ((httpx.ReadTimeout("lost"), True), (httpx.Response(502), True), (refusal, False)):
        with pytest.raises(CliError) as caught:
            Connection(answer).client.order("quote")
        assert ("before you buy again" in caught.value.message) is may_be_bought


@pytest.mark.parametrize(
    ("problem", "call", "tries"),
    [
        (httpx.ReadError("cut"), lambda client: client.cancel(1), 1),  # the console may have got the request
        (httpx.ConnectError("refused"), lambda client: client.cancel(1), TRIES),  # the console cannot have got it
        (httpx.ReadError("cut"), lambda client: client.whoami(), TRIES),
        (httpx.ReadError(""), lambda client: client.whoami(), TRIES),
        (httpx.Response(502), lambda client: client.cancel(1), 1),
        (httpx.Response(502), lambda client: client.whoami(), TRIES),
        (httpx.Response(500), lambda client: client.whoami(), 1),
    ],
)
def test_only_what_may_be_repeated_is_sent_again(problem, call, tries):
    line = Connection(problem)
    with pytest.raises(ApiError if isinstance(problem, httpx.Response) else Unreachable) as caught:
        call(line.client)
    assert ": ." not in str(caught.value), "an error without text has the name of its class"
    assert len(line.requests) == tries
    assert max(line.pauses, default=0) <= MAX_PAUSE_SECONDS


@pytest.mark.parametrize("target", ["https://evil.example.com/", "http://console.example.com/", "/elsewhere"])
def test_the_token_follows_no_redirect(target):
    line = Connection(httpx.Response(302, headers={"Location": target}))
    for call in (line.client.whoami, lambda: list(line.client.job_events(1))):
        with pytest.raises(UnexpectedAnswer, match="redirects"):
            call()
    assert {request.url.host for request in line.requests} == {"console.example.com"}


def test_addresses_in_answers_are_not_followed():
    page = {"results": [], "next": "https://evil.example.com/api/v1/datasets/?cursor=abc"}
    line = Connection(httpx.Response(200, json=page), httpx.Response(200, json={"results": [], "next": None}))
    assert list(line.client.datasets()) == []
    assert str(line.requests[1].url) == f"{URL}/api/v1/datasets/?cursor=abc"


@pytest.mark.parametrize(
    ("answer", "code", "fields"),
    [
        ({"code": "invalid", "message": "m", "fields": {"nodes": "n"}}, "invalid", {"nodes": "n"}),
        ({"code": "x", "message": "m", "fields": []}, "http_400", {}),
        ([], "http_400", {}),
        ("<html>", "http_400", {}),
    ],
)
def test_errors_have_the_consoles_code_and_fields(answer, code, fields):
    with pytest.raises(ApiError) as caught:
        Connection(httpx.Response(400, json=answer)).client.whoami()
    assert (caught.value.code, caught.value.fields) == (code, fields)


def test_an_answer_that_no_console_gives_is_an_error():
    no_organization = b'{"email": "a", "organization": [], "role": "", "capabilities": []}'
    for answer in (b"<html>", b"[]", b"{}", b'{"email": 1}', no_organization):
        with pytest.raises(UnexpectedAnswer):
            Connection(httpx.Response(200, content=answer)).client.whoami()


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("console.example.com", "https://console.example.com"),
        ("https://Console.Example.com/base/", "https://console.example.com/base"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost", "http://localhost"),
        ("http://console.example.com", None),
        ("http://127.0.0.1.example.com", None),
        ("https://user:password@console.example.com", None),
        ("ftp://console.example.com", None),
        ("https://console.example.com:port", None),
        ("https://", None),
        ("https://[::1", None),
        ("https://a\x01.example.com", None),
        ("", None),
    ],
)
def test_a_consoles_url_has_https_unless_it_is_on_this_machine(text, url):
    if url:
        assert normalize_url(text) == url
    else:
        with pytest.raises(CliError):
            normalize_url(text)


def test_a_token_of_the_environment_needs_its_console(tmp_path):
    with pytest.raises(CliError, match="TRAINYARD_URL"):
        Credentials({"TRAINYARD_TOKEN": "t", "XDG_CONFIG_HOME": str(tmp_path)}).console()
    stored = Credentials({"XDG_CONFIG_HOME": str(tmp_path)})
    stored.save(Console("https://a.example.com", "ty_a"))
    stored.save(Console("https://b.example.com", "ty_b"))
    assert stored.console().token == "ty_b"  # the last login
    assert stored.console("https://a.example.com").token == "ty_a"
    assert "ty_b" not in repr(stored.console())
    stored.remove()
    assert stored.console().token == "ty_a"


def test_a_token_of_the_environment_is_only_for_its_own_console(tmp_path):
    credentials = Credentials({"TRAINYARD_TOKEN": "t", "TRAINYARD_URL": "a.example.com"}, tmp_path / "tokens.json")
    credentials.save(Console("https://b.example.com", "ty_b"))
    for url, token in (("", "t"), ("https://A.example.com/", "t"), ("https://b.example.com", "ty_b")):
        assert credentials.console(url).token == token, url
    with pytest.raises(CliError, match=r"not logged in to https://c\.example\.com"):
        credentials.console("https://c.example.com")


@pytest.mark.parametrize(
    ("words", "options", "status"),
    [
        (("notebook", "start", "--node-spec", "nano", "--hours", "nan"), {}, 2),
        (("notebook", "start", "--node-spec", "nano", "--idle-minutes", "inf"), {}, 2),
        (("notebook", "extend", 1, "--hours", "1e308"), {}, 2),
        (("workspace", "sync", "--workspace", "\udcff"), {}, 2),  # an argument that is not UTF-8
        (("login", "https://a.example.com"), {"text": b"\xff"}, 2),
        (("logout",), {}, 1),  # its file is a folder
    ],
)
def test_unusable_input_is_an_error_without_a_traceback(home, monkeypatch, words, options, status):
    monkeypatch.chdir(home)
    shell = Shell(home, TRAINYARD_URL="https://a.example.com", TRAINYARD_TOKEN="t")
    shell.http = httpx.MockTransport(lambda _request: httpx.Response(404, json={"code": "not_found", "message": "m"}))
    (home / "config" / "trainyard" / "credentials.json").mkdir(parents=True)
    shell(*words, status=status, **options)
    assert shell.stderr.startswith("Error (")
