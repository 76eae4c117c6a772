"""Following a job over streams that end early, and keeping terminal commands in its output from the terminal."""

import json

import httpx
import pytest

from cli import watch
from cli.errors import ApiError, Unreachable
from cli.screen import Screen, clean, clean_output, money, size
from cli.watch import Watch, lines
from tests.cli.conftest import client_of
from tests.cli.test_client import example, schema

ESCAPE = "\x1b"


def job(state, *, attempts=(1,), **changes):
    """Return a job as the API shows it."""
    made = example(schema()["components"]["schemas"]["Job"], is_full=True)
    started = [{**made["attempts"][0], "number": number} for number in attempts]
    ended = {"finished_at": None} if state == "running" else {}
    return {**made, "state": state, "waiting_for": "", "attempts": started, **ended, **changes}


def stream(*events):
    return httpx.Response(200, text="".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events))


class FakeConsole:
    """A console with one job: each request for its state or an attempt's log gets the next answer.

    `asked` are the (attempt, offset) pairs of the requests for logs.
    """

    def __init__(self, states, logs):
        self.states, self.logs, self.asked, self.pauses = list(states), logs, [], []

    def __call__(self, request):
        query = dict(request.url.params)
        if request.url.path.endswith("/stream/"):
            return self.states.pop(0)
        self.asked.append((int(query["attempt"]), int(query["offset"])))
        return self.logs[int(query["attempt"])].pop(0)

    @property
    def client(self):
        return client_of(self)


def log(text, next_offset, *, eof=False, **fields):
    return ("log", {"text": text, "next_offset": next_offset, "eof": eof, **fields})


def test_a_job_is_followed_over_broken_streams_and_attempts(capsys):
    console = FakeConsole(
        [
            stream(("state", job("running"))),
            httpx.Response(503),
            stream(("metrics", {"loss": [[1, 0.25]]}), ("state", job("running", attempts=(1, 2)))),
            stream(("state", job("failed", attempts=(1, 2)))),
        ],
        {
            1: [stream(log("one\ntw", 6)), httpx.Response(502), stream(log("o\n", 8, eof=True))],
            2: [stream(log(f"{ESCAPE}]0;title\x07again", 5, eof=True))],
        },
    )
    followed = Watch(console.client, 1, Screen(), pause=console.pauses.append)
    assert followed.follow().state == "failed"
    followed.close()
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line in {"one", "two", "again"}] == ["one", "two", "again"]
    assert {"running", "failed"} <= set(printed)
    assert console.asked == [(1, 0), (1, 6), (1, 6), (2, 0)]


def test_a_job_that_the_console_does_not_find_is_an_error_at_once():
    missing = httpx.Response(404, json={"code": "not_found", "message": "m"})
    with pytest.raises(ApiError):
        Watch(FakeConsole([missing], {}).client, 1, Screen(), with_logs=False).follow()


def test_a_console_that_stays_unreachable_is_given_up(monkeypatch):
    monkeypatch.setattr(watch, "TRIES", 3)
    console = FakeConsole([httpx.Response(503)] * watch.TRIES, {1: [httpx.Response(503)] * watch.TRIES})
    with pytest.raises(ApiError):
        Watch(console.client, 1, Screen(), with_logs=False, pause=console.pauses.append).follow()
    with pytest.raises(ApiError):  # not an end, which would look like that of the output
        list(lines(console.client, 1, rank=0, attempt=1, pause=console.pauses.append))
    refused = FakeConsole([stream(("state", job("failed")))], {1: [httpx.Response(403)]})
    assert Watch(refused.client, 1, Screen(), pause=console.pauses.append).follow().state == "failed"
    empty = FakeConsole([stream()] * watch.TRIES, {})  # its streams end at once
    with pytest.raises(Unreachable):
        Watch(empty.client, 1, Screen(), with_logs=False, pause=console.pauses.append).follow()


def test_a_line_without_an_end_is_printed_in_parts(monkeypatch):
    monkeypatch.setattr(watch, "MAX_LINE_LENGTH", 10)
    console = FakeConsole([], {1: [stream(log("x" * 11, 11), log("y", 12, eof=True))]})
    assert [line.text for line in lines(console.client, 1, rank=0, attempt=1)] == ["x" * 11, "y"]


def test_a_line_has_the_time_of_its_beginning():
    # Times are [line of the text, Unix time]; a time holds up to the line of the next.
    parts = [log("a\nb\nc", 5, times=[[0, 1.5], [2, 2]]), log("c\nd", 8, times=[[0, 3.0], [1, 4.0]], eof=True)]
    found = list(lines(FakeConsole([], {1: [stream(*parts)]}).client, 1, rank=0, attempt=1, timestamps=True))
    assert found == [("a", 1.5), ("b", 1.5), ("cc", 2.0), ("d", 4.0)]


@pytest.mark.parametrize(
    ("text", "plain", "output"),  # `clean` removes colors too; `clean_output` keeps and ends them
    [
        ("plain\ttext", "plain\ttext", "plain\ttext"),
        (f"{ESCAPE}[31mred{ESCAPE}[0m", "red", f"{ESCAPE}[31mred{ESCAPE}[0m{ESCAPE}[0m"),
        (f"{ESCAPE}[31mred", "red", f"{ESCAPE}[31mred{ESCAPE}[0m"),
        (f"a{ESCAPE}[2J{ESCAPE}[Hb", "ab", "ab"),
        (f"a{ESCAPE}]52;c;ZWNobw==\x07b", "ab", "ab"),
        (f"a{ESCAPE}]8;;file:///etc\x1b\\b", "ab", "ab"),
        (f"a{ESCAPE}P+q{ESCAPE}\\b{ESCAPE}c", "ab", "ab"),
        (f"{ESCAPE}", "", ""),
        ("a\x9b31mb\u202e\u061cc\x07", "a31mbc", "a31mbc"),
        (" 10%\r 90%\r100%", " 10% 90%100%", "100%"),
        ("windows\r", "windows", "windows"),
    ],
)
def test_text_reaches_the_terminal_without_commands(text, plain, output):
    assert (clean(text), clean_output(text)) == (plain, output)


def test_amounts_and_sizes():
    assert [money(1234567, "USD"), money(500, "JPY"), money("1234", "KWD")] == ["12,345.67 USD", "500 JPY", "1.234 KWD"]
    sizes = [0, 1, 999, 1000, 999_949, 999_950, 2_500_000, 999_960_000, 3_000_000_000_000]
    assert [size(each) for each in sizes] == [
        "0 bytes", "1 byte", "999 bytes", "1.0 kB", "999.9 kB", "1.0 MB", "2.5 MB", "1.0 GB", "3,000.0 GB",
    ]  # fmt: skip
