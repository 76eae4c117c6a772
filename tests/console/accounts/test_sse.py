"""Server-sent events: their frames, comments while nothing happens, and the end when the reader loses access."""

import asyncio

import pytest

from console.core import sse
from console.core.sse import Event, event_stream


def frames(events, is_allowed=lambda: True, **options):
    async def collect():
        return [part.decode() async for part in event_stream(events, is_allowed=is_allowed, **options)]

    return asyncio.run(collect())


def test_frames_hold_every_kind_of_line_end_and_json():
    async def events():
        yield "log", "a\r\nb\rc\n"
        yield Event("state", {"state": "running", "n": 1}, id="7")

    assert frames(events()) == [
        "retry: 2000\n\n",
        "event: log\ndata: a\ndata: b\ndata: c\ndata: \n\n",
        'event: state\nid: 7\ndata: {"state":"running","n":1}\n\n',
    ]


def test_a_quiet_stream_sends_comments_between_its_events():
    async def events():
        await asyncio.sleep(0.05)
        yield "late", ""

    parts = frames(events(), heartbeat_seconds=0.01)
    assert parts[1] == ": still here\n\n"
    assert parts[-1] == "event: late\ndata: \n\n"


@pytest.mark.parametrize("pause", [0, 60], ids=["at the next event", "while there is no event"])
def test_a_reader_who_loses_access_receives_nothing_more_and_the_source_is_closed(monkeypatch, pause):
    monkeypatch.setattr(sse, "RECHECK_SECONDS", 0)
    answers, closed = iter([True, False]), []

    async def events():
        try:
            yield "first", ""
            await asyncio.sleep(pause)
            yield "second", ""
        finally:
            closed.append(True)

    parts = frames(events(), lambda: next(answers), heartbeat_seconds=0.01)
    assert parts == ["retry: 2000\n\n", "event: first\ndata: \n\n"]
    assert closed == [True]
