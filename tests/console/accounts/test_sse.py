import asyncio

import pytest

from console.accounts.sse import Event, event_stream, wants_events


def frames(events, **options):
    async def collect():
        return [part.decode() async for part in event_stream(events, **options)]

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


def test_silence_is_filled_and_does_not_disturb_the_events():
    async def events():
        await asyncio.sleep(0.05)
        yield "late", ""

    parts = frames(events(), heartbeat_seconds=0.01)
    assert parts[1] == ": still here\n\n"
    assert parts[-1] == "event: late\ndata: \n\n"


def test_the_source_is_closed_when_the_client_goes():
    closed = []

    async def events():
        try:
            while True:
                yield "tick", ""
                await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def leave_early():
        async def consume():
            async for _ in event_stream(events()):
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave_early())
    assert closed == [True]


def test_headers():
    async def events():
        yield "x", ""

    response = event_stream(events())
    assert response["Content-Type"] == "text/event-stream"
    assert response["Cache-Control"] == "no-cache"
    assert response["X-Accel-Buffering"] == "no"


@pytest.mark.parametrize(("accept", "wanted"), [("text/event-stream", True), ("text/html", False), (None, False)])
def test_who_wants_events(accept, wanted):
    assert wants_events({} if accept is None else {"Accept": accept}) is wanted
