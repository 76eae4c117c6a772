"""Resumable uploads through the API: the tus protocol, quota, tenancy, crashes."""

import hashlib
import threading
from base64 import b64encode
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from console.accounts.models import Quota, User
from console.core.errors import NotFound
from storage import catalog, files, garbage_collection, selectors, uploads
from storage.models import Allocation, DatasetVersion, Upload
from storage.quota import Reservation
from storage.trees import ENTRY_BYTES
from tests.console.processes import wait_for
from tests.crashes import Crash
from tests.factories.storage import DatasetFactory, WorkspaceFactory
from tests.racing import together
from tests.storage.archives import tar_of

pytestmark = pytest.mark.django_db
ROOT = "/api/v1/uploads/"
BYTES = "application/offset+octet-stream"
ARCHIVE = tar_of({"raw/a": b"12345", "b": b"6789"}, compressed=True)
CODE = b"print('hello')\n" * 1000
DATASET = {"purpose": "dataset", "name": "digits", "filename": "digits.tar.gz"}
FILE = {"purpose": "workspace", "name": "code", "path": "src/train.py"}


class Tus:
    """A client of tus."""

    def __init__(self, client):
        self.client = client

    def send(self, method, url=ROOT, body=b"", **headers):
        names = {name.replace("_", "-"): str(value) for name, value in headers.items()}
        headers = {"Tus-Resumable": "1.0.0", **names}
        return self.client.generic(method, url, body, content_type=headers.pop("Content-Type", BYTES), headers=headers)

    def create(self, size, metadata, body=None, **headers):
        packed = ",".join(f"{name} {b64encode(value.encode()).decode()}" for name, value in metadata.items())
        kind = BYTES if body is not None else "text/plain"
        extra = {"Upload_Length": size} if size is not None else {}
        return self.send("POST", ROOT, body or b"", Upload_Metadata=packed, Content_Type=kind, **extra, **headers)

    def begin(self, size, metadata, **headers):
        """Create an upload without bytes. Return its URL."""
        answer = self.create(size, metadata, **headers)
        assert answer.status_code == 201, answer.data
        return answer["Location"]

    def patch(self, url, offset, body, **headers):
        return self.send("PATCH", url, body, Upload_Offset=offset, **headers)

    def offset(self, url):
        return int(self.send("HEAD", url)["Upload-Offset"])

    def state(self, url):
        return self.client.get(url).json()


@pytest.fixture(autouse=True)
def _places(member):
    """A dataset and a workspace that take uploads."""
    DatasetFactory(organization=member.organization, name="digits")
    WorkspaceFactory(organization=member.organization, name="code")


@pytest.fixture
def tus(api, member):
    return Tus(api(member))


@pytest.fixture
def organization(member):
    return member.organization


def error(answer):
    return answer.status_code, answer.json()["code"]


def checksum(data, algorithm="sha256"):
    return f"{algorithm} {b64encode(hashlib.new(algorithm, data).digest()).decode()}"


def left_over(organization):
    """What an ended upload must not leave: files, and reserved quota."""
    paths = [*uploads.folder().iterdir(), *catalog.scratch().iterdir()]
    return [path.name for path in paths], list(Allocation.objects.filter(organization=organization))


def stored(organization, path="src/train.py"):
    root = selectors.workspace_folder(selectors.workspace_named(organization, "code"))
    with files.read(root=root, path=path).stream as stream:
        return stream.read()


def test_the_server_names_its_version_extensions_and_checksums(tus):
    answer = tus.client.options(ROOT)
    extensions = {"creation", "creation-with-upload", "checksum", "expiration", "termination", "concatenation"}
    assert set(answer["Tus-Extension"].split(",")) == extensions
    assert (answer["Tus-Version"], answer["Tus-Checksum-Algorithm"]) == ("1.0.0", "sha1,sha256")


def test_an_archive_in_three_pieces_becomes_a_version(tus, organization):
    url = tus.begin(len(ARCHIVE), DATASET)
    assert Allocation.objects.get().size_bytes == len(ARCHIVE)
    first, second = len(ARCHIVE) // 3, len(ARCHIVE) // 2
    assert tus.patch(url, 0, ARCHIVE[:first])["Upload-Offset"] == str(first)
    uploads._digests.clear()  # as after a restart: the process that continues has no hash of the beginning
    assert tus.patch(url, first, ARCHIVE[first:second]).status_code == 204
    head = tus.send("HEAD", url)
    assert (head["Upload-Offset"], head["Upload-Length"]) == (str(second), str(len(ARCHIVE)))
    assert (head["Cache-Control"], bool(head["Upload-Expires"])) == ("no-store", True)
    assert "purpose ZGF0YXNldA==" in head["Upload-Metadata"]
    last = tus.patch(url, second, ARCHIVE[second:])
    assert (last.status_code, last["Upload-Offset"]) == (204, str(len(ARCHIVE)))
    version = DatasetVersion.objects.get()
    digest = hashlib.sha256(ARCHIVE).hexdigest()
    assert (version.file_count, version.size_bytes, version.sha256) == (2, 9, digest)
    result = tus.state(url)
    assert (result["state"], result["version"], result["sha256"], result["error"]) == ("complete", 1, digest, None)
    assert tus.offset(url) == len(ARCHIVE)
    assert tus.patch(url, len(ARCHIVE), b"").status_code == 204
    assert DatasetVersion.objects.count() == 1
    assert left_over(organization) == ([], [])


def test_a_file_is_moved_into_the_workspace(tus, organization):
    url = tus.begin(len(CODE), FILE)
    inode = next(uploads.folder().iterdir()).stat().st_ino
    assert tus.patch(url, 0, CODE).status_code == 204
    workspace = selectors.workspace_named(organization, "code")
    placed = selectors.workspace_folder(workspace) / "src" / "train.py"
    assert placed.read_bytes() == CODE
    assert placed.stat().st_ino == inode
    assert (workspace.size_bytes, workspace.entry_count) == (len(CODE), 3)
    assert tus.state(url)["sha256"] == hashlib.sha256(CODE).hexdigest()
    assert left_over(organization) == ([], [])
    assert tus.patch(tus.begin(1, FILE), 0, b"x").status_code == 204  # replaces the first file
    workspace.refresh_from_db()
    assert (stored(organization), workspace.size_bytes, workspace.entry_count) == (b"x", 1, 3)


def test_an_archive_is_unpacked_into_a_folder_of_the_workspace(tus, organization):
    root = selectors.workspace_folder(selectors.workspace_named(organization, "code"))
    (root / "src" / "raw").mkdir(parents=True)
    (root / "src" / "raw" / "a").write_text("replaced")
    (root / "src" / "kept").write_text("kept")
    workspace = selectors.workspace_named(organization, "code")
    before = catalog.measure_workspace(workspace=workspace)
    metadata = {**FILE, "path": "src", "unpack": ""}
    assert tus.patch(tus.begin(len(ARCHIVE), metadata), 0, ARCHIVE).status_code == 204
    assert {path: stored(organization, f"src/{path}") for path in ("raw/a", "b", "kept")} == {
        "raw/a": b"12345", "b": b"6789", "kept": b"kept"
    }  # fmt: skip
    workspace.refresh_from_db()
    counted_bytes = workspace.size_bytes
    assert before != catalog.measure_workspace(workspace=workspace)
    workspace.refresh_from_db()
    # The bytes were right before the measurement. The entries were not: folders that were there had counted twice.
    assert counted_bytes == workspace.size_bytes
    assert left_over(organization) == ([], [])
    (root / "src" / "b").unlink()
    (root / "src" / "b").mkdir()
    (root / "src" / "raw" / "a").write_text("unchanged")
    assert error(tus.patch(tus.begin(len(ARCHIVE), metadata), 0, ARCHIVE)) == (400, "wrong_kind")
    assert stored(organization, "src/raw/a") == b"unchanged"


def test_a_bad_archive_ends_the_upload(tus, organization):
    url = tus.begin(500, DATASET)
    assert error(tus.patch(url, 0, b"x" * 500)) == (400, "bad_archive")
    result = tus.state(url)
    assert (result["state"], result["error"]["code"]) == ("failed", "bad_archive")
    assert tus.send("HEAD", url).status_code == 410
    assert error(tus.patch(url, 500, b"")) == (410, "upload_ended")
    assert left_over(organization) == ([], [])


def test_invalid_requests_are_refused(tus, settings):
    url = tus.begin(100, FILE)
    old = tus.send("PATCH", url, b"x", Upload_Offset=0, Tus_Resumable="0.2.2")
    assert (old.status_code, old["Tus-Version"]) == (412, "1.0.0")
    assert tus.send("PATCH", url, b"x", Upload_Offset=0, Content_Type="text/plain").status_code == 415
    assert error(tus.send("PATCH", url, b"x")) == (400, "invalid")
    for offset in (1, 101):  # before and behind the end
        assert error(tus.patch(url, offset, b"x")) == (409, "offset_conflict")
    assert error(tus.patch(url, 0, b"x" * 101)) == (413, "too_large")
    assert error(tus.send("POST", url)) == (405, "method_not_allowed")
    overridden = tus.send("POST", url, b"xy", X_HTTP_Method_Override="PATCH", Upload_Offset=0)
    assert (overridden.status_code, tus.offset(url)) == (204, 2)
    settings.MAX_UPLOAD_BYTES, settings.MAX_FILE_BYTES = 1000, 10
    assert error(tus.create(1001, DATASET)) == (413, "too_large")
    assert error(tus.create(11, FILE)) == (413, "too_large")
    for metadata, field in (
        ({}, "purpose"), ({**FILE, "path": ""}, "path"), ({**FILE, "name": "x\0y"}, "Upload-Metadata"),
    ):  # fmt: skip
        assert set(tus.create(1, metadata).json()["fields"]) == {field}
    assert set(tus.create(1, {"name": "x" * 64}, Upload_Concat="partial").json()["fields"]) == {"name"}
    for header in ("purpose !", "purpose ZA==,purpose ZA=="):
        refused = tus.send("POST", ROOT, Upload_Length=1, Upload_Metadata=header)
        assert set(refused.json()["fields"]) == {"Upload-Metadata"}
    for size in ("", "-1", "1.5", 2**63):
        assert set(tus.create(size, FILE).json()["fields"]) == {"Upload-Length"}
    assert error(tus.create(1, {**DATASET, "name": "missing"})) == (404, "not_found")
    for path in ("../x", "/etc/passwd", "a/../../b"):
        assert error(tus.create(1, {**FILE, "path": path})) == (400, "unsafe_path")


def test_a_link_in_the_workspace_leads_nowhere(tus, organization, tmp_path):
    (tmp_path / "outside").mkdir()
    root = selectors.workspace_folder(selectors.workspace_named(organization, "code"))
    (root / "src").symlink_to(tmp_path / "outside")
    for metadata, body in ((FILE, CODE), ({**FILE, "path": "src", "unpack": ""}, ARCHIVE)):
        assert error(tus.patch(tus.begin(len(body), metadata), 0, body)) == (400, "unsafe_path")
    assert list((tmp_path / "outside").iterdir()) == []
    assert left_over(organization) == ([], [])


def test_another_organization_neither_finds_nor_joins_a_part(tus, api, stranger):
    part, theirs = tus.begin(1, {}, Upload_Concat="partial"), Tus(api(stranger))
    tus.patch(part, 0, b"x")
    assert [len(each.client.get(ROOT).json()["results"]) for each in (tus, theirs)] == [1, 0]
    assert theirs.send("HEAD", part).status_code == 404  # the request matrix sends the other methods
    WorkspaceFactory(organization=stranger.organization, name="code")
    assert error(theirs.create(None, FILE, Upload_Concat=f"final;{part}")) == (400, "invalid")


def test_a_session_needs_the_csrf_token(tus, member):
    url = tus.begin(len(CODE), FILE)
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(member.user)
    assert Tus(browser).patch(url, 0, CODE).status_code == 403
    browser.get("/datasets/d/digits/")  # sets the cookie
    token = browser.cookies["csrftoken"].value
    assert Tus(browser).patch(url, 0, CODE, X_CSRFToken=token).status_code == 204


def test_the_first_bytes_may_come_with_the_creation(tus, organization):
    answer = tus.create(len(CODE), FILE, body=CODE[:100])
    assert (answer.status_code, answer["Upload-Offset"]) == (201, "100")
    assert tus.patch(answer["Location"], 100, CODE[100:]).status_code == 204
    assert stored(organization) == CODE
    empty = tus.create(0, FILE)
    assert (empty.status_code, stored(organization)) == (201, b"")
    assert tus.state(empty["Location"])["state"] == "complete"
    too_many = tus.create(len(CODE), FILE, body=CODE + b"x")
    wrong = tus.create(len(CODE), FILE, body=CODE, Upload_Checksum=checksum(b"x"))
    assert (error(too_many), error(wrong)) == ((413, "too_large"), (460, "checksum_mismatch"))
    assert left_over(organization) == ([], [])  # nobody knows the URL of such an upload


def test_bytes_with_a_wrong_checksum_are_dropped(tus, organization):
    url = tus.begin(len(CODE), FILE)
    wrong = tus.patch(url, 0, b"y" + CODE[1:100], Upload_Checksum=checksum(CODE[:100]))
    assert error(wrong) == (460, "checksum_mismatch")
    assert tus.offset(url) == 0
    assert tus.patch(url, 0, CODE[:100], Upload_Checksum=checksum(CODE[:100])).status_code == 204
    assert tus.patch(url, 100, CODE[100:], Upload_Checksum=checksum(CODE[100:], "sha1")).status_code == 204
    assert stored(organization) == CODE
    for header, expected in (("md5 AAAA", 400), ("sha1 !", 400), ("sha1", 460)):  # an empty digest does not match
        assert tus.patch(tus.begin(1, FILE), 0, b"x", Upload_Checksum=header).status_code == expected


def test_parts_are_joined_once(tus, organization):
    pieces = [CODE[:5000], CODE[5000:5001], CODE[5001:]]
    parts = [tus.begin(len(piece), {}, Upload_Concat="partial") for piece in pieces]
    final = "final;" + " ".join(parts)
    assert error(tus.create(None, FILE, Upload_Concat=final)) == (400, "invalid")  # the parts have no bytes yet
    for part, piece in zip(parts, pieces, strict=True):
        assert tus.patch(part, 0, piece).status_code == 204
    assert tus.send("HEAD", parts[0])["Upload-Concat"] == "partial"
    for wrong in (f"{final} {parts[0]}", "final;", "final;/x", "other"):
        assert error(tus.create(None, FILE, Upload_Concat=wrong)) == (400, "invalid")
    # A client may name a part by its full URL.
    created = tus.create(None, FILE, Upload_Concat=final.replace("/api", "https://trainyard.example.com/api"))
    assert (created.status_code, stored(organization)) == (201, CODE)
    url = created["Location"]
    assert (tus.state(url)["sha256"], tus.state(url)["state"]) == (hashlib.sha256(CODE).hexdigest(), "complete")
    assert tus.send("HEAD", url)["Upload-Concat"] == final
    again = tus.create(None, FILE, Upload_Concat=final)
    assert (again.status_code, again["Location"]) == (201, url)
    assert error(tus.create(None, FILE, Upload_Concat=f"final;{parts[1]}")) == (400, "invalid")
    assert error(tus.patch(url, len(CODE), b"")) == (403, "not_allowed")
    assert error(tus.send("DELETE", parts[0])) == (410, "upload_ended")
    assert left_over(organization) == ([], [])


def test_an_empty_file_arrives_and_is_not_claimed_to_if_its_upload_lost_it(tus, member, organization):
    parts = [tus.begin(0, {}, Upload_Concat="partial") for _part in range(2)]
    assert tus.create(None, FILE, Upload_Concat="final;" + " ".join(parts)).status_code == 201
    assert stored(organization) == b""
    url = tus.begin(0, {**FILE, "path": "lost.py"})
    Upload.objects.filter(key=url.split("/")[-2]).update(state=Upload.States.RECEIVING)  # as before its end
    User.objects.filter(pk=member.user_id).update(language="zh-hans")
    garbage_collection.collect()
    result = tus.state(url)
    assert (result["state"], result["error"]["message"]) == ("failed", "此上传已结束，请重新开始上传。")
    assert left_over(organization) == ([], [])


@pytest.mark.parametrize("copied", [0, 3])  # bytes of the second part
def test_an_interrupted_join_is_continued(tus, organization, copied):
    pieces = [CODE[:5000], CODE[5000:]]
    parts = [tus.begin(len(piece), {}, Upload_Concat="partial") for piece in pieces]
    for part, piece in zip(parts, pieces, strict=True):
        tus.patch(part, 0, piece)
    keys = [part.key for part in Upload.objects.order_by("pk")]
    new = uploads.NewUpload(size_bytes=0, **FILE)  # the size follows from the parts
    used = Upload.objects.latest("pk")
    final = uploads.create_final(organization=organization, user=None, new=new, part_keys=keys)
    with pytest.raises(uploads.UploadEnded):
        uploads.terminate(used)  # by a request that read the part before it was joined
    uploads._file(final).write_bytes(CODE[: 5000 + copied])
    uploads._file(Upload.objects.get(key=keys[0])).unlink()  # it has become the file of the final upload
    garbage_collection.collect()
    assert stored(organization) == CODE
    assert left_over(organization) == ([], [])


def test_quota_is_reserved_and_released(tus, organization):
    Quota.objects.update(max_storage_bytes=selectors.storage_used(organization) + 1000 + ENTRY_BYTES)
    url = tus.begin(1000, FILE)
    assert selectors.quota_left(organization) == 0
    assert error(tus.create(1, FILE)) == (413, "too_large")
    assert tus.send("DELETE", url).status_code == 204
    assert selectors.quota_left(organization) == 1000 + ENTRY_BYTES
    assert left_over(organization) == ([], [])
    url = tus.begin(len(ARCHIVE), DATASET)
    Quota.objects.update(max_storage_bytes=1)  # there is no room for the unpacked files
    assert error(tus.patch(url, 0, ARCHIVE)) == (413, "too_large")
    assert left_over(organization) == ([], [])


def test_the_number_of_unfinished_uploads_is_limited_and_one_whose_bytes_are_gone_has_ended(tus, monkeypatch):
    monkeypatch.setattr(uploads, "MAX_OPEN", 1)
    url = tus.begin(10, FILE)
    assert error(tus.create(1, FILE)) == (429, "too_many_uploads")
    uploads._file(Upload.objects.get()).unlink()  # as after the restore of a backup
    assert tus.send("HEAD", url).status_code == 410


def test_expired_uploads_are_removed(tus, organization):
    url, done = tus.begin(10, FILE), tus.begin(1, {**FILE, "path": "y"})
    tus.patch(url, 0, b"12345")
    tus.patch(done, 0, b"y")
    garbage_collection.collect()
    assert (tus.offset(url), tus.state(done)["state"]) == (5, "complete")
    Allocation.objects.update(updated_at=timezone.now() - timedelta(days=2))
    garbage_collection.collect()
    assert Allocation.objects.count() == 1  # reserved as long as the upload may go on
    Upload.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    garbage_collection.collect()
    assert [tus.send("HEAD", each).status_code for each in (url, done)] == [404, 404]
    assert left_over(organization) == ([], [])


@pytest.mark.parametrize(
    ("metadata", "point"),
    [
        (DATASET, "before"),
        (DATASET, "after"),
        (DATASET, "before, and the bytes are lost"),
        (FILE, "before"),
        (FILE, "after"),
        ({**FILE, "path": "", "unpack": ""}, "before"),
    ],
)
def test_finishing_is_repeated_after_a_crash(tus, organization, monkeypatch, metadata, point):
    """The process dies before or after it puts the bytes in place. The database does not say which."""

    def die(*_arguments, **_values):
        raise Crash

    url = tus.begin(len(ARCHIVE), metadata)
    places = (
        [(uploads, "_end")]
        if point == "after"
        else [(catalog, name) for name in ("publish_archive", "place_file", "unpack_into_workspace")]
    )
    with monkeypatch.context() as patch:
        for place in places:
            patch.setattr(*place, die)
        with pytest.raises(Crash):
            tus.patch(url, 0, ARCHIVE)
    assert (tus.offset(url), tus.state(url)["state"]) == (len(ARCHIVE), "finishing")
    killed = Reservation(organization, label="", key=Upload.objects.get().finishing_key)
    killed.count(size_bytes=killed.left_bytes())  # unlike the exception above, a kill leaves what it has reserved
    is_lost = point.endswith("lost")
    if is_lost:
        for path in uploads.folder().iterdir():  # as after the restore of a backup
            path.unlink()
    garbage_collection.collect()
    result = tus.state(url)
    if is_lost:
        assert (result["state"], result["error"]["code"]) == ("failed", "upload_ended")
    else:
        assert (result["state"], result["sha256"]) == ("complete", hashlib.sha256(ARCHIVE).hexdigest())
        assert metadata is not FILE or stored(organization) == ARCHIVE
    assert DatasetVersion.objects.count() == (metadata is DATASET and not is_lost)
    assert not Allocation.objects.exists()
    assert list(uploads.folder().iterdir()) == []


def test_an_upload_that_is_terminated_while_it_is_finished_publishes_nothing(tus, organization, monkeypatch):
    url, publish = tus.begin(len(ARCHIVE), DATASET), catalog._publish
    upload = Upload.objects.get()

    def terminate_and_publish(*arguments, **values):
        assert tus.send("DELETE", url).status_code == 204
        return publish(*arguments, **values)

    monkeypatch.setattr(catalog, "_publish", terminate_and_publish)
    assert error(tus.patch(url, 0, ARCHIVE)) == (404, "not_found")
    assert not DatasetVersion.objects.exists()
    assert left_over(organization) == ([], [])
    with pytest.raises(NotFound):
        uploads.finish(upload)  # by a process that read the upload before it was terminated


class Interleaved:
    """A body during which another request sends the same bytes."""

    def __init__(self, body, other):
        self.pieces, self.other = [body[:100], body[100:200]], other

    def read(self, _size, /):
        if len(self.pieces) == 1:
            self.other()
        return self.pieces.pop(0) if self.pieces else b""


def test_of_two_requests_at_once_one_fails(tus, organization):
    url = tus.begin(len(CODE), FILE)
    upload = Upload.objects.get()
    body = Interleaved(CODE, lambda: tus.patch(url, 100, CODE[100:150]))
    with pytest.raises(uploads.OffsetConflict):
        uploads.append(upload=upload, offset=0, stream=body)
    assert tus.offset(url) == 150  # the first piece of `body`, and the bytes of the other request
    tus.patch(url, 150, CODE[150:])
    assert (stored(organization), tus.state(url)["sha256"]) == (CODE, hashlib.sha256(CODE).hexdigest())
    url = tus.begin(len(CODE), FILE)
    body = Interleaved(CODE, lambda: tus.send("DELETE", url))
    with pytest.raises(uploads.UploadEnded):
        uploads.append(upload=Upload.objects.latest("pk"), offset=0, stream=body)
    assert left_over(organization) == ([], [])


class Lost:
    """The body of a client that lost its connection: its last bytes arrive late, then nothing does."""

    def __init__(self, upload):
        self.upload, self.pieces, self.has_begun = upload, [CODE[:100], CODE[100:150]], threading.Event()

    def read(self, _size, /):
        if len(self.pieces) == 1:
            self.has_begun.set()
            wait_for(lambda: uploads._has_lock_waiter(self.upload))
        if not self.pieces:
            raise TimeoutError
        return self.pieces.pop(0)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("next_request", ["HEAD", "PATCH"])
def test_the_next_request_sees_all_that_arrived_before_and_ends_a_lost_one(tus, next_request):
    url = tus.begin(len(CODE), FILE)
    body = Lost(Upload.objects.get())

    def continue_upload():
        body.has_begun.wait(30)
        return tus.offset(url) if next_request == "HEAD" else int(tus.patch(url, 150, CODE[150:])["Upload-Offset"])

    lost, offset = together(lambda: uploads.append(upload=body.upload, offset=0, stream=body), continue_upload)
    assert (type(lost), offset) == (uploads.UploadBroken, 150 if next_request == "HEAD" else len(CODE))
