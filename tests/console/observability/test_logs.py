"""Log lines as they are written: by our formatters, by Django, by Celery and by the ASGI application."""

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from console.accounts import services as accounts
from console.asgi import application
from console.observability import context, logs

ROOT = Path(__file__).resolve().parents[3]
SCOPE = {
    "type": "http", "method": "GET", "path": "/healthz", "query_string": b"secret=1", "http_version": "1.1",
    "headers": [(b"host", b"127.0.0.1"), (b"x-request-id", b"of-the-proxy-1")],
    "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "",
}  # fmt: skip
PROCESS = """
import logging
from console.celery import app
logging.getLogger("of.django").warning("password=%s", "hunter2")
app.log.setup("INFO")
logging.getLogger("of.celery").info("%s", "up")
"""
"""Writes one line as Django configures logging, and one as Celery does."""


@pytest.fixture
def written():
    """`written()` returns the lines that were logged so far, as JSON objects in the console's format."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.formatter("json"))
    root = logging.getLogger()
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)
    root.setLevel(level)


def record(message, *arguments, error=None):
    info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("jobs.dispatch", logging.WARNING, __file__, 1, message, arguments, info)


def test_a_line_is_one_json_object_with_its_context():
    with context.bound(request_id="request-1", job=7, run="job-7-1"):
        line = json.loads(logs.formatter("json").format(record("it\n%s", "broke")))
    assert line.pop("time").endswith("Z")
    assert line.pop("process") == os.getpid()
    assert line == {
        "level": "warning", "logger": "jobs.dispatch", "message": "it\nbroke",
        "request_id": "request-1", "job": 7, "run": "job-7-1",
    }  # fmt: skip


def test_a_line_of_text_is_one_line_whatever_a_client_writes_into_it():
    with context.bound(job=7):
        text = logs.formatter("text").format(record("Not Found: %s", "/x\n2026 CRITICAL forged"))
    assert "\n" not in text
    assert text.endswith("[warning] Not Found: /x | 2026 CRITICAL forged [jobs.dispatch] job=7")


SECRETS = (
    ("token ty_abcDEF123456789 was used", "abcDEF123456789"),
    ("key sk_live_51Habcdefgh", "51Habcdefgh"),
    ("key rk_test_51Habcdefgh", "51Habcdefgh"),
    ("secret whsec_51Habcdefgh", "51Habcdefgh"),
    ("{'Authorization': 'Token ty-unusual-but-secret'}", "unusual"),
    ("Authorization: Bearer eyJhbGciOi.J9.abc", "eyJhbGciOi"),
    ("Cookie: sessionid=abc123; csrftoken=def456", "abc123"),
    ("connecting to postgres://user:hunter2@db/name failed", "hunter2"),
    ("redis://:hunter2@redis:6379/0", "hunter2"),
    ("password=hunter2&next=/", "hunter2"),
    ('{"STRIPE_SECRET_KEY": "hunter2value"}', "hunter2value"),
    ("Not Found: /accounts/password/reset/key/1-c9x8y7/", "c9x8y7"),
    ("GET /accounts/confirm-email/MQ:1abcd:xyz/", "1abcd"),
    ("GET /invitations/SDFsdf-secret_7:xyz/accept/ 200", "SDFsdf"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\n-----END RSA PRIVATE KEY-----", "MIIEabc"),
)


def test_no_secret_is_written_in_a_message_or_a_traceback():
    for (text, secret), form in product(SECRETS, map(logs.formatter, logs.FORMATS)):
        assert secret not in form.format(record("%s", text))
        try:
            int(text)  # the message of its error quotes the text
        except ValueError as error:
            line = form.format(record("it failed", error=error))
        assert "ValueError" in line
        assert secret not in line
    text = "Job 7 could not be started: no token of the organization, 3 keys, http://127.0.0.1:8000/jobs/7/"
    assert logs.redact(text) == text


@pytest.mark.django_db
def test_a_request_has_one_id_in_its_lines_and_its_response(client, written):
    answer = client.get("/nothing-here", headers={"X-Request-Id": "proxy-4711-abc"})
    assert answer["X-Request-Id"] == "proxy-4711-abc"
    [line] = [line for line in written() if line["logger"] == "django.request"]
    assert line["request_id"] == "proxy-4711-abc"
    assert context.fields() == {}


@pytest.mark.django_db
def test_the_user_and_the_organization_are_bound_by_token_and_by_session(api, client, owner):
    client.force_login(owner.user)
    for answer in (api(owner).get("/api/v1/whoami/"), client.get("/")):
        bound = answer.wsgi_request.META[logs.FIELDS_KEY]
        assert (bound["user"], bound["organization"]) == (owner.user_id, owner.organization_id)


@pytest.mark.django_db
def test_an_api_token_is_never_written(client, owner, written):
    _, secret = accounts.create_token(membership=owner, name="test")
    client.get(f"/{secret}", headers={"Authorization": f"Token {secret}"})
    assert written()
    assert secret not in json.dumps(written())


def test_the_access_log_has_one_line_once_a_response_has_ended(caplog):
    received = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive():
        # After the request nothing comes, since the client stays connected.
        return received.pop() if received else await asyncio.get_running_loop().create_future()

    async def send(_message):
        pass

    with caplog.at_level(logging.INFO, logger="console.access"):
        asyncio.run(application(SCOPE, receive, send))
    [access] = [each for each in caplog.records if each.name == "console.access"]
    line = json.loads(logs.formatter("json").format(access))
    assert (line["path"], line["status"], line["bytes"]) == ("/healthz", 200, len(b'{"status": "ok"}'))
    assert line["request_id"] == "of-the-proxy-1"
    assert "secret" not in json.dumps(line)


def test_processes_of_django_and_celery_write_json_where_the_settings_say_so(tmp_path):
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "-c", PROCESS],
        cwd=ROOT, env=os.environ | {"LOG_FORMAT": "json", "TRAINYARD_VAR": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stderr.splitlines() if '"of.' in line]  # the loggers of PROCESS
    assert [line["message"] for line in lines] == ["password=[hidden]", "up"]
