"""The API of datasets and workspaces: archives, files, ranges, preconditions and streamed bodies."""

import hashlib

import pytest

from storage import catalog, registries, selectors, upload_stream
from tests.factories.storage import DatasetFactory, DatasetVersionFactory, ImageFactory, WorkspaceFactory
from tests.storage.archives import tar_of, zip_of

pytestmark = pytest.mark.django_db
ARCHIVE = tar_of({"raw/a": b"12345", "b": b"6789"}, compressed=True)
MIB = 1024**2


@pytest.fixture
def client(api, member):
    return api(member)


@pytest.fixture
def folder(workspace):
    return selectors.workspace_folder(workspace)


def send(client, address, body=b"", **extra):
    """PUT a raw body, as curl does."""
    return client.generic("PUT", f"/api/v1/{address}", body, content_type="application/x-tar", **extra)


def body_of(response):
    return b"".join(response.streaming_content)


def error(response):
    return response.status_code, response.json()["code"]


def test_a_dataset_from_creation_to_deletion(client):
    created = client.post("/api/v1/datasets/", {"name": "mnist", "description": "Digits"})
    assert created.status_code == 201
    assert set(created.json()) == {"name", "description", "created_at", "latest"}
    answer = send(client, "datasets/mnist/archive/", ARCHIVE)
    assert answer.status_code == 201
    version = answer.json()
    assert (version["version"], version["size_bytes"], version["file_count"]) == (1, 9, 2)
    assert version["sha256"] == hashlib.sha256(ARCHIVE).hexdigest()
    assert send(client, "datasets/mnist/archive/", zip_of({"x": b"1"})).json()["version"] == 2
    (listed,) = client.get("/api/v1/datasets/").json()["results"]
    assert listed["latest"]["version"] == 2
    versions = client.get("/api/v1/datasets/mnist/").json()["versions"]
    assert ([each["version"] for each in versions], versions[1]) == ([2, 1], version)
    assert client.delete("/api/v1/datasets/mnist/").status_code == 204
    assert error(client.get("/api/v1/datasets/mnist/")) == (404, "not_found")


def test_a_file_is_written_listed_read_and_deleted(client, workspace):
    files = "workspaces/code/files"
    assert client.get(f"/api/v1/{files}/").json() == {"path": "", "entries": [], "truncated": False, "next": None}
    answer = send(client, f"{files}/code/train.py", b"print()")
    assert (answer.status_code, answer.json()) == (201, {"path": "code/train.py", "size": 7})
    assert send(client, f"{files}/code/train.py", b"print(1)").status_code == 200
    assert send(client, f"{files}/empty").status_code == 201
    assert [send(client, f"{files}/data/raw?folder=1").status_code for _ in range(2)] == [201, 200]
    listed = client.get(f"/api/v1/{files}/").json()["entries"]
    kinds = [(entry["name"], entry["kind"], entry["size"]) for entry in listed]
    assert kinds == [("code", "folder", 0), ("data", "folder", 0), ("empty", "file", 0)]
    below = client.get(f"/api/v1/{files}/code/").json()
    assert (below["path"], [entry["name"] for entry in below["entries"]]) == ("code", ["train.py"])
    read = client.get(f"/api/v1/{files}/code/train.py")
    assert (body_of(read), read["Content-Length"]) == (b"print(1)", "8")
    assert client.delete(f"/api/v1/{files}/code").status_code == 204
    assert error(client.delete(f"/api/v1/{files}/code")) == (404, "file_not_found")
    assert error(client.get(f"/api/v1/{files}/code/train.py")) == (404, "file_not_found")
    workspace.refresh_from_db()
    assert workspace.size_bytes == 0


@pytest.mark.usefixtures("workspace")
def test_a_file_that_changed_meanwhile_is_not_overwritten(client):
    file = "workspaces/code/files/train.py"
    created = send(client, file, b"1", HTTP_IF_NONE_MATCH="*")
    read = client.get(f"/api/v1/{file}")
    etag = read["ETag"]
    assert (created.status_code, body_of(read), created["ETag"]) == (201, b"1", etag)
    assert error(send(client, file, b"2", HTTP_IF_NONE_MATCH="*")) == (412, "file_changed")
    saved = send(client, file, b"2", HTTP_IF_MATCH=etag)
    assert saved.status_code == 200
    assert error(send(client, file, b"3", HTTP_IF_MATCH=etag)) == (412, "file_changed")
    assert body_of(client.get(f"/api/v1/{file}")) == b"2"
    one_of_two = f'"0-0-0", {saved["ETag"]}'
    assert send(client, file, b"3", HTTP_IF_MATCH=one_of_two).status_code == 200
    assert send(client, file, b"4").status_code == 200


def test_downloads_are_attachments_whatever_their_names(client, folder):
    for name in ('q"uote\\.txt', "tab\t.txt", "数据.txt", "<script>.html"):
        (folder / name).write_text("x")
        response = client.get(f"/api/v1/workspaces/code/files/{name}".replace("\t", "%09"))
        assert body_of(response) == b"x"
        assert response["Content-Disposition"].startswith("attachment; filename")
        assert (response["Content-Type"], response["X-Content-Type-Options"]) == ("application/octet-stream", "nosniff")


RANGES = [
    ("bytes=0-0", b"0"), ("bytes=7-", b"789"), ("bytes=-3", b"789"), ("bytes=-99", b"0123456789"),
    ("bytes=5-" + "9" * 900, b"56789"), ("Bytes = 1-1", b"1"),
    # refused
    ("bytes=10-", 416), ("bytes=-0", 416),
    # ignored, and answered with the whole file
    ("bytes=4-2", 200), ("bytes=0-1,4-5", 200), ("bytes=-", 200), ("bytes=a-b", 200), ("bytes=٠-٢", 200),
    ("lines=0-1", 200), ("bytes=" + "9" * 1001 + "-", 200),
]  # fmt: skip
"""A Range header for a file of ten digits, and the part that is sent, or else the status."""


def test_a_range_of_a_file_is_sent_refused_or_ignored(client, folder):
    (folder / "digits").write_bytes(b"0123456789")
    for header, expected in RANGES:
        response = client.get("/api/v1/workspaces/code/files/digits", headers={"Range": header})
        if expected == 416:
            assert (*error(response), response["Content-Range"]) == (416, "range_not_satisfiable", "bytes */10"), header
            continue
        body = body_of(response)
        assert (response["Accept-Ranges"], response["Content-Length"]) == ("bytes", str(len(body)))
        if expected == 200:
            assert (response.status_code, body, "Content-Range" in response) == (200, b"0123456789", False), header
            continue
        start = b"0123456789".index(expected)
        assert (response.status_code, body) == (206, expected), header
        assert response["Content-Range"] == f"bytes {start}-{start + len(expected) - 1}/10"


def test_a_range_of_another_version_is_the_whole_file(client, folder):
    address = "/api/v1/workspaces/code/files/model"
    (folder / "model").write_bytes(b"first")
    response = client.get(address)
    assert body_of(response) == b"first"
    etag = response["ETag"]
    part = {"Range": "bytes=2-", "If-Range": etag}
    assert body_of(client.get(address, headers=part)) == b"rst"
    response = client.head(address, headers=part)
    assert (response.status_code, body_of(response)) == (200, b"")  # only GET has ranges
    (folder / "new").write_bytes(b"later")
    (folder / "new").rename(folder / "model")
    response = client.get(address, headers=part)
    assert (response.status_code, body_of(response)) == (200, b"later")
    (folder / "model").write_bytes(b"")
    assert client.get(address, headers={"Range": "bytes=0-"}).status_code == 416
    response = client.get(address)
    assert (response.status_code, response["Content-Length"], body_of(response)) == (200, "0", b"")


def test_paths_outside_the_workspace_are_refused(client, folder):
    (folder.parent / "secret").write_text("secret")
    (folder / "link").symlink_to("..")
    for path in ("../secret", "%2e%2e/secret", "%2e%2e%2fsecret", "/etc/passwd", "a%00b", "link/x"):
        address = f"workspaces/code/files/{path}"
        answers = client.get(f"/api/v1/{address}"), send(client, address, b"x"), client.delete(f"/api/v1/{address}")
        assert [error(answer) for answer in answers] == [(400, "unsafe_path")] * 3, path
    assert (folder.parent / "secret").read_text() == "secret"


def test_a_search_keeps_the_spaces_of_a_folders_name(client, folder):
    (folder / " a ").mkdir()
    (folder / " a " / "train.py").touch()
    answer = client.get("/api/v1/workspaces/code/search/", {"q": "train", "path": " a "})
    assert [match["path"] for match in answer.json()["results"]] == [" a /train.py"]


class Wire:
    """A connection with `size` bytes of body, and the size of the largest read."""

    def __init__(self, size):
        self.left = size
        self.largest = 0

    def read(self, size=-1):
        assert size >= 0
        self.largest = max(self.largest, size)
        piece = bytes(min(size, self.left))
        self.left -= len(piece)
        return piece

    readline = read


def send_wire(client, address, wire, length):
    """Send the bytes of a wire, and announce `length` bytes."""
    return send(client, address, **{"wsgi.input": wire, "CONTENT_LENGTH": str(length)})


@pytest.mark.usefixtures("workspace")
def test_bodies_are_streamed_both_ways(client):
    wire = Wire(12 * MIB)
    assert send_wire(client, "workspaces/code/files/big", wire, 12 * MIB).status_code == 201
    assert wire.largest <= MIB
    pieces = [len(piece) for piece in client.get("/api/v1/workspaces/code/files/big").streaming_content]
    assert (sum(pieces), max(pieces)) == (12 * MIB, MIB)


def test_an_interrupted_body_leaves_nothing_and_one_too_large_is_refused_unread(client, folder, member):
    DatasetFactory(organization=member.organization, name="d")
    for address in ("workspaces/code/files/a", "datasets/d/archive/"):
        assert error(send_wire(client, address, Wire(1000), 2000)) == (400, "upload_broken")
        wire = Wire(10**12)
        assert error(send_wire(client, address, wire, 10**12)) == (413, "too_large")
        assert wire.left == 10**12
    assert list(folder.iterdir()) == []
    assert list(catalog.scratch().iterdir()) == []


def test_a_failed_connection_raises_upload_broken():
    class Failing:
        def read(self, size, /):
            raise ConnectionResetError

    for body in (upload_stream._SizedBody(Failing(), 5), upload_stream._ChunkedBody(Failing())):
        with pytest.raises(upload_stream.UploadBroken):
            body.read(5)


def test_admin_pages_show_no_secret(owner, admin_client):
    version = DatasetVersionFactory(dataset__organization=owner.organization)
    rows = {
        "image": ImageFactory(),
        "dataset": version.dataset,
        "datasetversion": version,
        "workspace": WorkspaceFactory(organization=owner.organization),
        "registry": registries.save_registry(organization=owner.organization, host="a.b", password="hunter2"),
    }
    for model, row in rows.items():
        page = admin_client.get(f"/admin/storage/{model}/{row.pk}/change/").content.decode()
        assert "hunter2" not in page
        assert "secret" not in page
        # Administrators add only images; customers create the rest.
        assert admin_client.get(f"/admin/storage/{model}/add/").status_code == (200 if model == "image" else 403)
