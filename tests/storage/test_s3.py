"""The client of S3, against a real server: signatures, listings, multipart uploads."""

import http.client
from contextlib import closing
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit

import pytest

from storage import s3
from tests import seaweedfs
from tests.http_server import serving

pytestmark = pytest.mark.xdist_group("seaweedfs")


def send(method, url, body, **headers):
    """The status of a request to a signed URL."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc)
    connection.request(method, url.removeprefix(f"http://{parts.netloc}"), body=body, headers=headers)
    with connection.getresponse() as response, closing(connection):
        return response.status


def test_the_signature_of_the_specification():
    """The example of AWS's documentation, but with the bucket in the path, for which botocore 1.44 gave this value."""
    bucket = s3.Bucket(
        "https://s3.amazonaws.com",
        "examplebucket",
        "us-east-1",
        "AKIAIOSFODNN7EXAMPLE",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    )
    url = s3.signed_url(bucket, "GET", "test.txt", seconds=86400, now=datetime(2013, 5, 24, tzinfo=UTC))
    assert url.endswith("733255ef022bec3f2a8701cd61d4b371f3f28c9f193a1f02279211d48d5193d7")


def test_a_default_port_is_not_signed():
    plain, explicit = (
        s3.Bucket(f"https://s3.example.com{port}", "tests", "us-east-1", "key-id", "key-secret")
        for port in ("", ":443")
    )
    now = datetime(2026, 1, 1, tzinfo=UTC)
    signatures = {s3.signed_url(bucket, "GET", "x", now=now).partition("?")[2] for bucket in (plain, explicit)}
    assert len(signatures) == 1


def test_a_signed_url_is_good_for_one_method_until_it_expires(s3_server):
    seaweedfs.put(s3_server, "w/secret", b"1")
    expired = s3.signed_url(s3_server, "GET", "w/secret", seconds=60, now=datetime(2020, 1, 1, tzinfo=UTC))
    assert send("GET", expired, None) == 403
    assert send("DELETE", s3.signed_url(s3_server, "GET", "w/secret"), None) == 403


def test_a_part_url_takes_only_that_part_of_that_size(s3_server):
    multipart_id = s3.create_multipart(s3_server, "m/object")
    url = s3.part_url(s3_server, "m/object", multipart_id, 1, size=10, seconds=60)
    tampered = [url.replace("partNumber=1", "partNumber=2"), url.replace("m/object", "m/other")]
    assert [send("PUT", each, b"x" * 10) for each in tampered] == [403, 403]
    assert [send("PUT", url, b"x" * size) for size in (9, 11, 10)] == [403, 403, 200]
    parts = s3.list_parts(s3_server, "m/object", multipart_id)
    assert [(part.number, part.size) for part in parts] == [(1, 10)]
    assert seaweedfs.keys(s3_server, "m/") == ([], ["m/object"])
    s3.complete_multipart(s3_server, "m/object", multipart_id, parts)
    assert seaweedfs.keys(s3_server, "m/") == (["m/object"], [])
    with pytest.raises(s3.S3Error, match="404 NoSuchUpload"):
        s3.list_parts(s3_server, "m/object", multipart_id)


class ChunkedError(BaseHTTPRequestHandler):
    """Refuses each request with an error in chunks, as AWS does. SeaweedFS sends the length instead."""

    def do_GET(self):
        body = b"<Error><Code>NoSuchBucket</Code></Error>"
        self.protocol_version = "HTTP/1.1"
        self.send_response(404)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))


def test_an_error_in_chunks_has_its_code():
    with serving(HTTPServer(("127.0.0.1", 0), ChunkedError)) as server:
        bucket = s3.Bucket(f"http://127.0.0.1:{server.server_port}", "gone", "us-east-1", allows_private=True)
        with pytest.raises(s3.S3Error, match="404 NoSuchBucket"):
            list(s3.list_objects(bucket, ""))


ENTITY = '<?xml version="1.0" encoding="UTF-16"?><!DOCTYPE r [<!ENTITY e "true">]><r><IsTruncated>&e;</IsTruncated></r>'
ENDLESS = (
    "<r><IsTruncated>true</IsTruncated><NextContinuationToken>a</NextContinuationToken>"
    "<NextKeyMarker>a</NextKeyMarker></r>"
)


@pytest.mark.parametrize(
    ("body", "length", "ask"),
    [
        (ENTITY.encode("utf-16"), None, lambda bucket: list(s3.list_objects(bucket, ""))),
        (ENDLESS.encode(), None, lambda bucket: list(s3.list_objects(bucket, ""))),
        (ENDLESS.encode(), None, lambda bucket: list(s3.list_multiparts(bucket, ""))),
        (b"", "x", lambda bucket: s3.find_object(bucket, "key")),
        (b"", "-5", lambda bucket: s3.find_object(bucket, "key")),
    ],
    ids=["an entity in UTF-16", "endless objects", "endless uploads", "a size that is no number", "a negative size"],
)
def test_an_invalid_response_is_refused(body, length, ask):
    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", length or str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    with serving(HTTPServer(("127.0.0.1", 0), Server)) as server, pytest.raises(s3.S3Error, match="200"):
        ask(s3.Bucket(f"http://127.0.0.1:{server.server_port}", "b", "us-east-1", allows_private=True))
