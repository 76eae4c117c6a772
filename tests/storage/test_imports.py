"""Imports from HTTPS addresses: which hosts are reached, and that a broken transfer continues."""

import base64
import ssl
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from django.utils import timezone

from console.accounts.models import Quota
from console.core import connections
from console.core.errors import InvalidInput
from storage import dataset_files, garbage_collection, import_progress, imports, selectors
from storage.models import Allocation, DatasetImport
from tests.factories.storage import DatasetFactory
from tests.http_server import serving
from tests.kubernetes.certificates import Certificates
from tests.storage.archives import tar_of
from tests.storage.refusals import refused_fields

pytestmark = pytest.mark.django_db
CONTENT = bytes(range(256)) * 400


class Server(ThreadingHTTPServer):
    """Serves `files` by path. It cuts the first `cuts` answers in half, and redirects the paths in `redirects`.

    After `cuts`, it refuses `throttled` requests because there are too many.
    With `change`, it has these files after its first answer, with another ETag unless `keeps_etag` is set.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.redirects, self.requests = {}, {}, []
        self.cuts, self.throttled, self.etag = 0, 0, '"1"'
        self.change, self.keeps_etag = None, False

    @property
    def host(self):
        return f"127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range"), self.headers.get("If-Range")))
        if self.path in server.redirects:
            self.send_response(302)
            self.send_header("Location", server.redirects[self.path])
            self.end_headers()
            return
        content = server.files.get(self.path)
        if server.throttled and not server.cuts:
            server.throttled -= 1
            self.send_error(429)
            return
        if content is None:
            self.send_error(404)
            return
        start = 0
        if (range_ := self.headers.get("Range")) and self.headers.get("If-Range") == server.etag:
            start = int(range_.removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", server.etag)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        if server.cuts:
            server.cuts -= 1
            body = body[: len(body) // 2]
        if server.change:  # while the first answer is sent
            server.files, server.change = server.change, None
            server.etag = server.etag if server.keeps_etag else '"2"'
        self.wfile.write(body)

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def server(settings, monkeypatch):
    """A server that imports may reach, although its address is private."""
    certificates = Certificates()
    server = Server()
    server.socket = certificates.context().wrap_socket(server.socket, server_side=True)
    settings.DATASET_IMPORT_HOSTS = [server.host]
    trusted = ssl.create_default_context(cadata=base64.b64decode(certificates.authority).decode())
    monkeypatch.setattr(connections, "tls_context", lambda: trusted)
    monkeypatch.setattr(connections, "is_public", lambda _address: True)
    monkeypatch.setattr(imports.time, "sleep", lambda _seconds: None)
    with serving(server):
        yield server


@pytest.fixture
def dataset(owner):
    return DatasetFactory(organization=owner.organization, name="digits")


def imported(dataset, url, user=None):
    """Start an import and carry it out."""
    row = imports.start_import(dataset=dataset, user=user, url=url)
    imports.run_import(row)
    row.refresh_from_db()
    return row


def content_of(version, path):
    return (selectors.version_folder(version) / path).read_bytes()


def test_an_archive_is_unpacked_and_a_file_is_stored(server, dataset, owner):
    server.files = {"/a.tar": tar_of({"x/y": b"1"}), "/data%20set.csv?v=1": CONTENT}
    first = imported(dataset, f"https://{server.host}/a.tar")
    assert ([row.path for row in dataset_files.list_page(version=first.version, path="x").rows]) == ["x/y"]
    second = imported(dataset, f"https://{server.host}/data%20set.csv?v=1")
    assert content_of(second.version, "data set.csv") == CONTENT
    assert (second.version.number, second.error, second.size_bytes) == (2, "", len(CONTENT))
    server.files = {"/a.tar": tar_of({"é\0": b""})}  # PostgreSQL stores no NUL
    assert "é\ufffd in this archive" in imported(dataset, f"https://{server.host}/a.tar").error
    assert [path.name for path in imports.folder().iterdir()] == [imports.LOCK_FILE]
    owner.user.language = "zh-hans"
    owner.user.save()
    server.files = {"/bad.tar": tar_of({"../x": b""}), "/broken.tar": CONTENT}
    bad, broken = (imported(dataset, f"https://{server.host}/{name}.tar", owner.user) for name in ("bad", "broken"))
    # A page translates the second error. It could not translate the first, which contains a name.
    assert bad.error.startswith("此压缩包中的名称 ../x")
    assert broken.error == "This archive can't be read. Send a .tar, .tar.gz or .zip file."


def test_a_cut_transfer_continues(server, dataset):
    server.files, server.cuts, server.throttled = {"/f": CONTENT}, 2, 1
    row = imported(dataset, f"https://{server.host}/f")
    assert content_of(row.version, "f") == CONTENT
    half = len(CONTENT) // 2
    rest = f"bytes={half + half // 2}-"
    assert [range_ for _path, range_, _validator in server.requests] == [None, f"bytes={half}-", rest, rest]


def test_a_cut_transfer_without_a_validator_starts_again_and_is_given_up_in_the_end(server, dataset):
    """A weak ETag (`W/`) does not prove that the file is the same, so no transfer can continue."""
    server.files, server.etag = {"/f": CONTENT}, 'W/"1"'
    server.cuts = imports.MAX_FAILURES - 1
    assert content_of(imported(dataset, f"https://{server.host}/f").version, "f") == CONTENT
    server.requests.clear()
    server.cuts = 100
    assert imported(dataset, f"https://{server.host}/f").error == imports.UNREACHABLE
    assert len(server.requests) == imports.MAX_FAILURES


def test_a_changed_file_is_received_from_its_start_and_a_wrong_rest_is_refused(server, dataset):
    server.files, server.cuts, server.change = {"/f": CONTENT}, 1, {"/f": b"new" * 10}
    row = imported(dataset, f"https://{server.host}/f")
    assert content_of(row.version, "f") == b"new" * 10
    server.files, server.cuts, server.change = {"/f": CONTENT}, 1, {"/f": CONTENT + b"longer"}
    server.keeps_etag = True  # so only the length shows that the rest is of another file
    assert imported(dataset, f"https://{server.host}/f").error == imports.REFUSED


def test_a_killed_import_continues_and_an_ended_one_is_not_repeated(server, dataset):
    server.files = {"/f": CONTENT}
    row = imports.start_import(dataset=dataset, user=None, url=f"https://{server.host}/f")
    imports._path_of(row).write_bytes(CONTENT[:1000])
    DatasetImport.objects.update(validator='"1"', size_bytes=len(CONTENT))
    killed = imports.Reservation(dataset.organization, label="digits", key=row.allocation_key)
    killed.count(size_bytes=killed.left_bytes())
    imports.run_import(row)
    assert server.requests == [("/f", "bytes=1000-", '"1"')]
    row.refresh_from_db()
    assert row.error == ""
    assert content_of(row.version, "f") == CONTENT
    imports.run_import(row)
    DatasetImport.objects.update(ended_at=None)  # as if the process had died after it published
    imports.run_import(row)
    assert (dataset.versions.count(), len(server.requests)) == (1, 1)
    received = imports.start_import(dataset=dataset, user=None, url=f"https://{server.host}/f")
    imports._path_of(received).write_bytes(CONTENT)
    DatasetImport.objects.filter(pk=received.pk).update(validator='"1"', size_bytes=len(CONTENT))
    imports.run_import(received)
    assert (dataset.versions.count(), len(server.requests)) == (2, 1)
    assert not Allocation.objects.exists()


def test_one_import_is_carried_out_at_a_time_and_starts_the_next(server, dataset, monkeypatch):
    server.files = {"/f": CONTENT}
    first, second = (
        imports.start_import(dataset=dataset, user=None, url=f"https://{server.host}/f") for _number in range(2)
    )
    with imports.import_lock(imports.LOCK_FILE) as is_free:
        assert is_free
        assert not imports.run_import(first)
    assert server.requests == []
    sent = []
    monkeypatch.setattr(imports, "send", lambda _task, pk: sent.append(pk))
    imports.import_dataset(first.pk)
    assert sent == [second.pk]
    imports.import_dataset(second.pk)
    assert (dataset.versions.count(), len(sent)) == (2, 1)


REFUSED_ADDRESSES = [
    ("http://data.example.com/f", ["data.example.com"]),
    ("https://user:word@data.example.com/f", ["data.example.com"]),
    ("https://data.example.com:8443/f", ["data.example.com"]),
    ("https://evil.example/f", ["data.example.com"]),
    ("https://data.example.com.evil.example/f", ["data.example.com", "*.example.com"]),
    ("https://evilexample.com/f", ["*.example.com"]),
    ("https://data.example.com/\r\nHost: x", ["data.example.com"]),
    ("https://[::1", ["::1"]),
    ("https:///f", ["data.example.com"]),
    ("file:///etc/passwd", ["data.example.com"]),
    ("https://data.example.com/f", []),
    ("https://data.example.com/" + "f" * 2000, ["data.example.com"]),
]
"""An address, and the allowed hosts."""


def test_addresses_of_other_hosts_or_forms_are_refused(settings, dataset):
    for url, hosts in REFUSED_ADDRESSES:
        settings.DATASET_IMPORT_HOSTS = hosts
        assert refused_fields(imports.start_import, dataset=dataset, user=None, url=url) == ["url"], url


def test_a_public_name_with_a_private_address_is_not_reached(settings, dataset, monkeypatch):
    settings.DATASET_IMPORT_HOSTS = ["data.example.com"]
    monkeypatch.setattr(connections.socket, "create_connection", lambda *_a, **_o: pytest.fail("connected"))
    for address in ("127.0.0.1", "::ffff:127.0.0.1", "2002:7f00:1::1"):
        found = [(0, 0, 0, "", (address, 443))]
        monkeypatch.setattr(connections.socket, "getaddrinfo", lambda *_a, found=found, **_o: found)
        row = imported(dataset, "https://data.example.com/f")
        assert (row.version, row.error) == (None, imports.NOT_ALLOWED), address


def test_no_setting_allows_the_metadata_service_of_a_cloud():
    """169.254.169.254 as it is, in IPv6 addresses that lead to it, and other addresses that are of no server."""
    for host in (
        "169.254.169.254", "[::ffff:169.254.169.254]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::a9fe:a9fe]",
        "[2002:a9fe:a9fe::]", "[2001:0:a9fe:a9fe::]", "[fe80::1%1]", "224.0.0.1", "0.0.0.0",
    ):  # fmt: skip
        with pytest.raises(connections.ForbiddenAddress):
            connections.connection_to(f"http://{host}", allows_private=True)


def test_redirects_and_certificates_are_checked(server, dataset, monkeypatch):
    server.files = {"/f": CONTENT}
    server.redirects = {
        "/good": "/f",
        "/loop": "/loop",
        "/plain": f"http://{server.host}/f",
        "/out": "https://evil.example/f",
    }
    good = imported(dataset, f"https://{server.host}/good")
    assert content_of(good.version, "good") == CONTENT
    for path, error in (
        ("loop", imports.REFUSED), ("plain", imports.NOT_ALLOWED), ("out", imports.NOT_ALLOWED),
        ("missing", imports.REFUSED),
    ):  # fmt: skip
        assert imported(dataset, f"https://{server.host}/{path}").error == error
    monkeypatch.setattr(connections, "tls_context", ssl.create_default_context)  # which does not trust the server
    assert imported(dataset, f"https://{server.host}/good").error == imports.UNREACHABLE


def test_an_import_is_limited_in_size_by_the_quota_and_in_number(server, dataset, settings):
    server.files = {"/f": CONTENT}
    settings.MAX_UPLOAD_BYTES = len(CONTENT) - 1
    assert "size limit" in imported(dataset, f"https://{server.host}/f").error
    settings.MAX_UPLOAD_BYTES = 10**9
    # Room for the bytes, but not for the entries.
    Quota.objects.update(max_storage_bytes=selectors.storage_used(dataset.organization) + len(CONTENT))
    assert imported(dataset, f"https://{server.host}/f").version is None
    assert selectors.usage_by_kind(dataset.organization)["uploads"].size_bytes == 0
    for _number in range(imports.MAX_OPEN):
        imports.start_import(dataset=dataset, user=None, url=f"https://{server.host}/f")
    with pytest.raises(InvalidInput, match=f"has {imports.MAX_OPEN} imports in progress"):
        imports.start_import(dataset=dataset, user=None, url=f"https://{server.host}/f")


def test_the_time_limit_of_an_import_does_not_count_its_wait(server, dataset, monkeypatch):
    server.files = {"/f": CONTENT}
    monkeypatch.setattr(import_progress, "REPORT_SECONDS", 0)
    waited = imports.start_import(dataset=dataset, user=None, url=f"https://{server.host}/f")
    DatasetImport.objects.update(created_at=timezone.now() - timedelta(days=1))
    imports.run_import(waited)
    assert (waited.error, waited.received_bytes) == ("", len(CONTENT))
    monkeypatch.setattr(import_progress, "MAX_DURATION", timedelta(0))
    assert imported(dataset, f"https://{server.host}/f").error == import_progress.TOO_SLOW


def test_a_dataset_shows_its_open_imports_and_recent_failures_but_none_whose_version_was_removed(dataset):
    now = timezone.now()
    create = partial(DatasetImport.objects.create, dataset=dataset, url="https://example.com/f")
    still_open, failed = create(), create(ended_at=now, error="No such file.")
    create(ended_at=now - timedelta(days=2), error="No such file.")  # failures are shown for a day
    for _number in range(20):
        create(ended_at=now)  # its version was removed
    assert imports.shown_imports(dataset) == [failed, still_open]


@pytest.mark.usefixtures("dataset")
def test_an_import_is_started_over_the_api_and_its_file_is_kept_while_it_is_open(server, api, owner):
    client = api(owner)
    answer = client.post("/api/v1/datasets/digits/imports/", {"url": f"https://{server.host}/f"})
    assert (answer.status_code, answer.json()["ended_at"]) == (201, None)
    assert client.post("/api/v1/datasets/digits/imports/", {"url": "http://x/"}).status_code == 400
    (listed,) = client.get("/api/v1/datasets/digits/imports/").json()["results"]
    assert listed["id"] == answer.json()["id"]
    (imports.folder() / imports._name_of(listed["id"])).write_bytes(b"x")
    garbage_collection.collect()
    assert len(list(imports.folder().iterdir())) == 1  # the file of the open import
