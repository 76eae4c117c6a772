"""Event streams are logged when they end, by the process that serves them."""

import asyncio
import json
import logging

from console.asgi import StreamHandler
from console.operations import logs


def scope(path):
    return {
        "type": "http", "method": "GET", "path": path, "query_string": b"secret=1", "http_version": "1.1",
        "headers": [(b"host", b"127.0.0.1"), (b"accept", b"text/event-stream"), (b"x-request-id", b"of-the-proxy-1")],
        "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "",
    }  # fmt: skip


def test_a_stream_is_one_line_with_its_request_and_what_it_sent(caplog):
    sent = []

    async def send(message):
        sent.append(message)

    coming = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive():
        return coming.pop() if coming else await asyncio.get_running_loop().create_future()

    with caplog.at_level(logging.INFO, logger="console.live.access"):
        asyncio.run(StreamHandler()(scope("/healthz"), receive, send))
    [record] = [each for each in caplog.records if each.name == "console.live.access"]
    line = json.loads(logs.JsonLines().format(record))
    assert (line["path"], line["status"], line["bytes"]) == ("/healthz", 200, len(b'{"status": "ok"}'))
    assert line["request_id"] == "of-the-proxy-1"
    assert "secret" not in json.dumps(line)
