"""Lines as they are written: by our formatters, by Django, by real gunicorn and Celery."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery.app.trace import build_tracer
from gunicorn.config import Config

from billing.tasks import expire_quotes
from console.accounts import services as accounts
from console.celery import app
from console.operations import context, logs, work
from console.operations.gunicorn_lines import GunicornLines

FACTS = ("method", "path", "status", "seconds", "bytes", "request_id", "user", "trace_id")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def written():
    """What the console's configuration writes, as JSON lines; `written()` gives the objects."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonLines())
    root = logging.getLogger()
    root.addHandler(handler)
    level, _ = root.level, root.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)
    root.setLevel(level)


def record(message, *arguments, error=None):
    info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("jobs.dispatch", logging.WARNING, __file__, 1, message, arguments, info)


def test_a_line_is_one_json_object_with_what_it_is_about():
    with context.bound(request_id="request-1", job=7, run="job-7-1"):
        line = json.loads(logs.JsonLines().format(record("it\n%s", "broke")))
    assert line.pop("time").endswith("Z")
    assert line.pop("process") == os.getpid()
    assert line == {
        "level": "warning", "logger": "jobs.dispatch", "message": "it\nbroke",
        "request_id": "request-1", "job": 7, "run": "job-7-1",
    }  # fmt: skip


def test_a_line_of_text_is_one_line_whatever_a_stranger_puts_into_it():
    with context.bound(job=7):
        text = logs.TextLines().format(record("Not Found: %s", "/x\n2026 CRITICAL forged"))
    assert "\n" not in text
    assert text.endswith("WARNING jobs.dispatch Not Found: /x | 2026 CRITICAL forged [job=7]")


@pytest.mark.parametrize("form", [logs.JsonLines(), logs.TextLines()])
@pytest.mark.parametrize(
    ("text", "secret"),
    [
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
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\n-----END RSA PRIVATE KEY-----", "MIIEabc"),
    ],
)
def test_no_secret_is_written_in_a_message_or_in_a_traceback(form, text, secret):
    assert secret not in form.format(record("%s", text))
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # raised here, to have a traceback
        int(text)
    written = form.format(record("it failed", error=caught.value))
    assert "ValueError" in written
    assert secret not in written


def test_ordinary_words_stay():
    text = "Job 7 could not be started: no token of the organization, 3 keys, http://127.0.0.1:8000/jobs/7/"
    assert logs.redacted(text) == text


def test_only_two_formats_are_there():
    for form in logs.FORMATS:
        assert logs.configuration(form=form, level="INFO")["root"]["level"] == "INFO"
    with pytest.raises(ValueError, match="text, json"):
        logs.configuration(form="xml", level="INFO")


@pytest.mark.django_db
def test_a_request_has_an_id_its_lines_say_and_its_answer_tells(client, owner, written):
    answer = client.get("/nothing-here", headers={"X-Request-Id": "proxy-4711-abc"})
    assert answer["X-Request-Id"] == "proxy-4711-abc"
    [line] = [line for line in written() if line["logger"] == "django.request"]
    assert line["request_id"] == "proxy-4711-abc"
    assert context.fields() == {}
    forged = client.get("/healthz", headers={"X-Request-Id": "x y"})["X-Request-Id"]
    assert context.SANE_ID.fullmatch(forged)


@pytest.mark.django_db
def test_who_asks_is_known_by_token_and_by_session(api, client, owner):
    for ask in (
        lambda: api(owner).get("/api/v1/whoami/"),
        lambda: (client.force_login(owner.user), client.get("/"))[1],
    ):
        answer = ask()
        assert answer.status_code == 200
        bound = answer.wsgi_request.META[logs.BOUND]
        assert (bound["user"], bound["organization"]) == (owner.user_id, owner.organization_id)


@pytest.fixture
def gunicorn_lines():
    """What gunicorn's parent makes of our class."""
    return GunicornLines(Config())


def test_the_access_line_of_gunicorn_says_who_and_leaves_the_query_out(gunicorn_lines, written):
    assert gunicorn_lines.access_log_enabled
    environ = {
        "REQUEST_METHOD": "GET", "PATH_INFO": "/jobs/7/", "QUERY_STRING": "secret=1",
        "RAW_URI": "/jobs/7/?secret=1", logs.BOUND: {"request_id": "request-1", "user": 3, "trace_id": "f" * 32},
    }  # fmt: skip
    gunicorn_lines.access(SimpleNamespace(status="200 OK", sent=12), None, environ, timedelta(milliseconds=7))
    [line] = [line for line in written() if line["logger"] == "gunicorn.access"]
    assert {name: line.get(name) for name in FACTS} == {
        "method": "GET", "path": "/jobs/7/", "status": 200, "seconds": 0.007, "bytes": 12,
        "request_id": "request-1", "user": 3, "trace_id": "f" * 32,
    }  # fmt: skip
    assert "secret=1" not in json.dumps(line)


def test_a_task_carries_its_request_from_sender_to_worker(shared, written):
    sent = {}
    with context.bound(request_id="request-1", user=3, organization=5, job=7):
        work._send_along(headers=sent)
    seen = []

    @app.task(name="tests.look", bind=True)
    def look(task):
        seen.append(context.fields())
        logging.getLogger("tests").info("in the task")

    try:
        # as a worker runs it: signals and all
        tracer = build_tracer("tests.look", look, app=app)
        tracer("id-1", (), {}, {"id": "id-1", "task": "tests.look", "headers": sent, **sent})
    finally:
        app.tasks.pop("tests.look")
    assert seen == [{"request_id": "request-1", "user": 3, "organization": 5, "task": "tests.look"}]
    [line] = [line for line in written() if line["logger"] == "tests"]
    assert (line["request_id"], line["task"]) == ("request-1", "tests.look")
    assert context.fields() == {}


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_process_writes_json_where_the_settings_say_so(tmp_path):
    program = "import logging; logging.getLogger('here').warning('password=%s', 'hunter2')"
    done = run("manage.py", "shell", "-c", program, LOG_FORMAT="json", TRAINYARD_VAR=str(tmp_path))
    [line] = [json.loads(line) for line in done.stderr.splitlines() if '"here"' in line]
    assert line["message"] == "password=[hidden]"
    program = "from console.celery import app; app.log.setup('INFO'); "
    program += "import logging; logging.getLogger('celery.worker').info('%s', 'up')"
    done = run("manage.py", "shell", "-c", program, LOG_FORMAT="json", TRAINYARD_VAR=str(tmp_path))
    assert [json.loads(line)["message"] for line in done.stderr.splitlines() if '"celery.worker"' in line] == ["up"]
    refused = run("manage.py", "check", LOG_FORMAT="xml", TRAINYARD_VAR=str(tmp_path))
    assert refused.returncode
    assert "LOG_FORMAT is 'xml'" in refused.stderr


@pytest.mark.django_db
def test_tokens_never_reach_a_line(client, owner, written):
    _, secret = accounts.create_token(membership=owner, name="test")
    client.get(f"/{secret}", headers={"Authorization": f"Token {secret}"})
    expire_quotes.apply()
    assert written()
    assert secret not in json.dumps(written())
