from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpResponse
from django.test import Client
from pytest_django import DjangoAssertNumQueries, Settings
from rest_framework.test import APIClient

from console.accounts.models import Membership, Quota
from console.accounts.roles import Role
from storage import catalog, raw, registries, selectors
from storage.models import Workspace
from tests.factories.accounts import MembershipFactory
from tests.factories.storage import DatasetFactory, DatasetVersionFactory, ImageFactory, WorkspaceFactory
from tests.storage.archives import tar_of, zip_of

pytestmark = pytest.mark.django_db
MakeApi = Callable[..., APIClient]
ARCHIVE = tar_of({"raw/a": b"12345", "b": b"6789"}, compressed=True)
MIB = 1024**2


@pytest.fixture
def client(api: MakeApi, member: Membership) -> APIClient:
    return api(member)


@pytest.fixture
def workspace(member: Membership) -> Workspace:
    made: Workspace = WorkspaceFactory(organization=member.organization, name="code")
    return made


def send(client: Client, address: str, body: bytes = b"") -> HttpResponse:
    """A PUT of a raw body, as curl would send it."""
    return client.generic("PUT", f"/api/v1/{address}", body, content_type="application/x-tar")


def body_of(response: Any) -> bytes:
    return b"".join(response.streaming_content)


def finish(response: Any) -> None:
    """What a server does after an answer, less closing the test's database."""
    for close in response._resource_closers:
        close()


def error(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["code"]


def test_images(client: APIClient, stranger: Membership) -> None:
    catalog.ensure_builtin_images()
    ImageFactory(name="theirs", organization=stranger.organization)
    answer = client.get("/api/v1/images/").json()
    assert [image["name"] for image in answer["results"]] == ["horovod-tensorflow", "horovod", "tensorflow", "pytorch"]
    assert answer["next"] is None
    assert answer["results"][3] == {
        "name": "pytorch",
        "title": "PyTorch",
        "description": "PyTorch with torchvision and TensorBoard.",
        "frameworks": ["pytorch"],
        "reference": "",
        "builtin": True,
    }


def test_a_dataset_from_name_to_version(client: APIClient) -> None:
    made = client.post("/api/v1/datasets/", {"name": "mnist", "description": "Digits"})
    assert made.status_code == 201
    assert made.json() | {"created_at": ""} == {
        "name": "mnist",
        "description": "Digits",
        "created_at": "",
        "latest": None,
    }
    answer = send(client, "datasets/mnist/archive/", ARCHIVE)
    assert answer.status_code == 201
    version = answer.json()
    assert version | {"published_at": ""} == {
        "version": 1,
        "size_bytes": 9,
        "file_count": 2,
        "sha256": hashlib.sha256(ARCHIVE).hexdigest(),
        "published_at": "",
    }
    assert send(client, "datasets/mnist/archive/", zip_of({"x": b"1"})).json()["version"] == 2
    assert send(client, "datasets/mnist/archive/", tar_of({"x": b"1"})).json()["version"] == 3
    (listed,) = client.get("/api/v1/datasets/").json()["results"]
    assert listed["latest"]["version"] == 3
    read = client.get("/api/v1/datasets/mnist/").json()
    assert [one["version"] for one in read["versions"]] == [3, 2, 1]
    assert read["versions"][2] == version
    assert client.delete("/api/v1/datasets/mnist/").status_code == 204
    assert error(client.get("/api/v1/datasets/mnist/")) == (404, "not_found")
    assert client.get("/api/v1/datasets/").json()["results"] == []


@pytest.mark.parametrize("address", ["datasets/", "workspaces/"])
def test_wrong_names(client: APIClient, address: str) -> None:
    for wrong in ("", "A b", "x" * 64, "../x"):
        answer = client.post(f"/api/v1/{address}", {"name": wrong})
        assert error(answer) == (400, "invalid")
        assert set(answer.json()["fields"]) == {"name"}
    assert error(client.post(f"/api/v1/{address}", {})) == (400, "invalid")
    assert error(client.generic("POST", f"/api/v1/{address}", "{", "application/json")) == (400, "malformed")
    assert client.post(f"/api/v1/{address}", {"name": "same"}).status_code == 201
    taken = client.post(f"/api/v1/{address}", {"name": "same"})
    assert error(taken) == (409, "name_taken")
    assert set(taken.json()["fields"]) == {"name"}


def test_refused_archives(client: APIClient, member: Membership, settings: Settings) -> None:
    dataset = DatasetFactory(organization=member.organization, name="d")
    address = "datasets/d/archive/"
    assert error(send(client, address)) == (400, "bad_archive")
    assert error(send(client, address, b"nonsense")) == (400, "bad_archive")
    assert error(send(client, address, tar_of({"../x": b""}))) == (400, "unsafe_path")
    assert error(send(client, "datasets/none/archive/", ARCHIVE)) == (404, "not_found")
    settings.MAX_UPLOAD_BYTES = len(ARCHIVE) - 1
    assert error(send(client, address, ARCHIVE)) == (413, "too_large")
    settings.MAX_UPLOAD_BYTES = MIB
    Quota.objects.update(max_storage_bytes=8)
    assert error(send(client, address, ARCHIVE)) == (413, "too_large")
    assert not dataset.versions.exists()


def test_a_workspace(client: APIClient) -> None:
    assert client.post("/api/v1/workspaces/", {"name": "main"}).status_code == 201
    assert [one["name"] for one in client.get("/api/v1/workspaces/").json()["results"]] == ["main"]
    assert client.get("/api/v1/workspaces/main/").json()["size_bytes"] == 0
    assert client.get("/api/v1/workspaces/main/files/").json() == {"path": "", "entries": [], "truncated": False}
    assert client.delete("/api/v1/workspaces/main/").status_code == 204
    assert error(client.get("/api/v1/workspaces/main/files/")) == (404, "not_found")


def test_files(client: APIClient, workspace: Workspace) -> None:
    files = "workspaces/code/files"
    answer = send(client, f"{files}/code/train.py", b"print()")
    assert (answer.status_code, answer.json()) == (201, {"path": "code/train.py", "size": 7})
    assert send(client, f"{files}/code/train.py", b"print(1)").status_code == 200
    assert send(client, f"{files}/empty").status_code == 201
    assert send(client, f"{files}/data/raw?folder=1").status_code == 201
    assert send(client, f"{files}/data/raw?folder=1").status_code == 200
    listed = client.get(f"/api/v1/{files}/").json()["entries"]
    assert [(entry["name"], entry["kind"], entry["size"]) for entry in listed] == [
        ("code", "folder", 0),
        ("data", "folder", 0),
        ("empty", "file", 0),
    ]
    below = client.get(f"/api/v1/{files}/code/").json()
    assert (below["path"], [entry["name"] for entry in below["entries"]]) == ("code", ["train.py"])
    read = client.get(f"/api/v1/{files}/code/train.py")
    assert body_of(read) == b"print(1)"
    assert read["Content-Type"] == "application/octet-stream"
    assert read["X-Content-Type-Options"] == "nosniff"
    assert read["Content-Disposition"] == 'attachment; filename="train.py"'
    assert read["Content-Length"] == "8"
    head = client.head(f"/api/v1/{files}/code/train.py")
    assert (head["Content-Length"], body_of(head)) == ("8", b"")
    finish(head)
    assert client.delete(f"/api/v1/{files}/code").status_code == 204
    assert error(client.delete(f"/api/v1/{files}/code")) == (404, "file_not_found")
    assert error(client.get(f"/api/v1/{files}/code/train.py")) == (404, "file_not_found")
    workspace.refresh_from_db()
    assert workspace.size_bytes == 0


def test_strange_names_in_headers(client: APIClient, workspace: Workspace) -> None:
    folder = selectors.workspace_folder(workspace)
    for name in ('q"uote\\.txt', "tab\t.txt", "数据.txt", "<script>.html"):
        (folder / name).write_text("x")
        response = client.get(f"/api/v1/workspaces/code/files/{name}".replace("\t", "%09"))
        assert body_of(response) == b"x"
        assert response["Content-Disposition"].startswith("attachment; filename")
        assert response["Content-Type"] == "application/octet-stream"


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "a/../../secret",
        "..",
        "%2e%2e/secret",
        "%2e%2e%2fsecret",
        "/etc/passwd",
        "a%00b",
        "x" * 256,
        "link/x",
        "link",
    ],
)
def test_paths_that_leave(client: APIClient, workspace: Workspace, path: str) -> None:
    folder = selectors.workspace_folder(workspace)
    (folder.parent / "secret").write_text("secret")
    (folder / "link").symlink_to("..")
    address = f"/api/v1/workspaces/code/files/{path}"
    assert error(client.get(address)) == (400, "unsafe_path")
    if path != "link":
        assert error(send(client, address.removeprefix("/api/v1/"), b"x")) == (400, "unsafe_path")
        assert error(client.delete(address)) == (400, "unsafe_path")
    assert (folder.parent / "secret").read_text() == "secret"


def test_what_is_no_file(client: APIClient, workspace: Workspace) -> None:
    folder = selectors.workspace_folder(workspace)
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    assert error(client.get("/api/v1/workspaces/code/files/pipe")) == (400, "wrong_kind")
    assert error(send(client, "workspaces/code/files/folder", b"x")) == (400, "wrong_kind")
    assert error(send(client, "workspaces/code/files/pipe/x?folder=1")) == (400, "wrong_kind")
    assert error(client.get("/api/v1/workspaces/code/files/none")) == (404, "file_not_found")


def test_large_files(client: APIClient, workspace: Workspace, settings: Settings) -> None:
    assert send(client, "workspaces/code/files/big", bytes(12 * MIB)).status_code == 201
    read = client.get("/api/v1/workspaces/code/files/big")
    pieces = [len(piece) for piece in read.streaming_content]
    assert (sum(pieces), max(pieces)) == (12 * MIB, MIB)
    settings.MAX_FILE_BYTES = MIB
    assert error(send(client, "workspaces/code/files/big", bytes(MIB + 1))) == (413, "too_large")
    assert (selectors.workspace_folder(workspace) / "big").stat().st_size == 12 * MIB


class Wire:
    """What a server hands over: counts how it is read, and may break off."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.largest = 0

    def read(self, size: int = -1) -> bytes:
        assert size >= 0
        self.largest = max(self.largest, size)
        piece = bytes(min(size, self.left))
        self.left -= len(piece)
        return piece

    readline = read


def test_bodies_are_never_read_whole(client: APIClient, workspace: Workspace) -> None:
    wire = Wire(50 * MIB)
    extra = {"wsgi.input": wire, "CONTENT_LENGTH": str(50 * MIB)}
    answer = client.generic("PUT", "/api/v1/workspaces/code/files/big", b"", **extra)
    assert answer.status_code == 201
    assert wire.largest <= MIB
    assert (selectors.workspace_folder(workspace) / "big").stat().st_size == 50 * MIB


def test_bodies_in_chunks(client: APIClient, workspace: Workspace) -> None:
    extra = {"wsgi.input": io.BytesIO(b"chunks"), "wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
    answer = client.generic("PUT", "/api/v1/workspaces/code/files/a", b"", **extra)
    assert (answer.status_code, answer.json()["size"]) == (201, 6)


def test_a_body_that_breaks_off(client: APIClient, workspace: Workspace, member: Membership) -> None:
    DatasetFactory(organization=member.organization, name="d")
    for address in ("workspaces/code/files/a", "datasets/d/archive/"):
        extra = {"wsgi.input": Wire(1000), "CONTENT_LENGTH": "2000"}
        assert error(client.generic("PUT", f"/api/v1/{address}", b"", **extra)) == (400, "upload_broken")
    assert list(selectors.workspace_folder(workspace).iterdir()) == []
    assert list(catalog.scratch().iterdir()) == []


def test_a_body_that_announces_too_much_is_refused_unread(client: APIClient, workspace: Workspace) -> None:
    wire = Wire(10**12)
    extra = {"wsgi.input": wire, "CONTENT_LENGTH": str(10**12)}
    assert error(client.generic("PUT", "/api/v1/workspaces/code/files/a", b"", **extra)) == (413, "too_large")
    assert wire.left == 10**12


def test_a_connection_that_fails_is_a_broken_upload() -> None:
    class Failing:
        def read(self, size: int, /) -> bytes:
            raise ConnectionResetError

    for body in (raw._Announced(Failing(), 5), raw._Chunked(Failing())):
        with pytest.raises(raw.UploadBroken):
            body.read(5)


ROUTES = [
    ("get", "images/", False),
    ("get", "datasets/", False),
    ("post", "datasets/", True),
    ("get", "datasets/d/", False),
    ("delete", "datasets/d/", True),
    ("put", "datasets/d/archive/", True),
    ("get", "workspaces/", False),
    ("post", "workspaces/", True),
    ("get", "workspaces/w/", False),
    ("delete", "workspaces/w/", True),
    ("get", "workspaces/w/files/", False),
    ("get", "workspaces/w/files/f", False),
    ("put", "workspaces/w/files/f", True),
    ("delete", "workspaces/w/files/f", True),
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route[0]}-{route[1]}")
def test_who_may_do_what(api: MakeApi, owner: Membership, stranger: Membership, route: tuple[str, str, bool]) -> None:
    method, address, changes = route
    DatasetVersionFactory(dataset__organization=owner.organization, dataset__name="d")
    workspace = WorkspaceFactory(organization=owner.organization, name="w")
    (selectors.workspace_folder(workspace) / "f").write_text("x")

    def ask(membership: Membership | None) -> int:
        response = getattr(api(membership), method)(f"/api/v1/{address}")
        finish(response)
        return int(response.status_code)

    assert ask(None) == 401
    named = address.count("/") > 1
    assert ask(stranger) == (404 if named else 400 if changes else 200)
    for role in (Role.VIEWER, Role.BILLING, Role.MEMBER, Role.OWNER):
        membership = MembershipFactory(organization=owner.organization, role=role)
        status = ask(membership)
        if changes and role in {Role.VIEWER, Role.BILLING}:
            assert status == 403
        elif role is Role.MEMBER:
            assert status in {200, 201, 204, 400}  # 400: a body was missing
            break
        else:
            assert status == 200


def test_lists_cost_the_same_however_long(
    api: MakeApi, owner: Membership, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    client = api(owner)
    for count in (1, 60):
        for number in range(count):
            DatasetVersionFactory(dataset__organization=owner.organization, dataset__name=f"d{count}-{number}")
            WorkspaceFactory(organization=owner.organization, name=f"w{count}-{number}")
    client.get("/api/v1/datasets/")  # from here on the token need not be marked as used
    for address in ("datasets/", "workspaces/", "images/"):
        with django_assert_num_queries(2):
            answer = client.get(f"/api/v1/{address}").json()
        assert len(answer["results"]) == (0 if address == "images/" else 50)
    following = client.get(client.get("/api/v1/datasets/").json()["next"]).json()
    assert len(following["results"]) == 11


@pytest.fixture
def staff_client(owner: Membership) -> Client:
    owner.user.is_staff = owner.user.is_superuser = True
    owner.user.save()
    client = Client()
    client.force_login(owner.user)
    return client


@pytest.mark.parametrize("model", ["image", "dataset", "datasetversion", "workspace", "registry"])
def test_admin_pages(staff_client: Client, owner: Membership, model: str) -> None:
    registry = registries.save_registry(organization=owner.organization, host="a.b", password="hunter2")
    version = DatasetVersionFactory(dataset__organization=owner.organization)
    workspace = WorkspaceFactory(organization=owner.organization)
    rows = {
        "image": ImageFactory().pk,
        "dataset": version.dataset.pk,
        "datasetversion": version.pk,
        "workspace": workspace.pk,
        "registry": registry.pk,
    }
    assert staff_client.get(f"/admin/storage/{model}/").status_code == 200
    page = staff_client.get(f"/admin/storage/{model}/{rows[model]}/change/")
    assert page.status_code == 200
    assert "hunter2" not in page.content.decode()
    assert "secret" not in page.content.decode().replace("csrf", "")
    added = staff_client.get(f"/admin/storage/{model}/add/").status_code
    assert added == (200 if model == "image" else 403)
