"""Direct uploads to a real bucket: parts, completion, the fetch, quota, tenancy, crashes, garbage collection."""

import hashlib
from datetime import timedelta

import pytest
from django.utils import timezone

from console.serving.application import UPLOAD_PATHS
from storage import direct_uploads, garbage_collection, s3, selectors, tasks, uploads
from storage.models import Allocation, Upload
from tests import seaweedfs
from tests.factories.storage import DatasetFactory, WorkspaceFactory
from tests.storage.archives import tar_of
from tests.storage.test_s3 import send

pytestmark = [pytest.mark.django_db, pytest.mark.xdist_group("seaweedfs")]
ROOT = "/api/v1/uploads/"
PART = 5 * 1024**2
"""The size of a part: the smallest that S3 allows."""
ARCHIVE = tar_of({"raw/a": bytes(range(256)) * 45_000})  # 11 MiB: three parts
DATASET = {"purpose": "dataset", "name": "digits", "filename": "digits.tar", "size_bytes": len(ARCHIVE)}
FILE = {"purpose": "workspace", "name": "code", "path": "src/data.bin", "size_bytes": 3}


@pytest.fixture(autouse=True)
def _places(member, monkeypatch, upload_bucket):
    """A dataset and a workspace that take uploads through `upload_bucket`; no task fetches them before a test does."""
    monkeypatch.setattr(direct_uploads, "PART_BYTES", PART)
    monkeypatch.setattr(direct_uploads, "send", lambda _task: None)
    DatasetFactory(organization=member.organization, name="digits")
    WorkspaceFactory(organization=member.organization, name="code")


@pytest.fixture
def client(api, member):
    return api(member)


def begin(client, values):
    answer = client.post(f"{ROOT}direct/", values)
    assert answer.status_code == 201, answer.data
    return answer.json()


def url_of(upload, end=""):
    return f"{ROOT}{upload['id']}/{end}"


def send_parts(client, upload, content, numbers):
    urls = client.post(url_of(upload, "parts/"), {"numbers": numbers}).json()["results"]
    for entry in urls:
        start = (entry["number"] - 1) * upload["part_size_bytes"]
        part = content[start : start + upload["part_size_bytes"]]
        assert len(part) == entry["size_bytes"]
        assert send("PUT", entry["url"], part) == 200


def left_in(bucket):
    """Return the keys of the objects that uploads left in the bucket, and the keys of unfinished multipart uploads."""
    return seaweedfs.keys(bucket, direct_uploads._prefix())


def test_parts_become_a_dataset_version(client, upload_bucket):
    upload = begin(client, DATASET)
    assert (upload["part_size_bytes"], upload["part_count"]) == (PART, 3)
    assert Allocation.objects.get().size_bytes == len(ARCHIVE)
    send_parts(client, upload, ARCHIVE, [3, 1])
    assert client.get(url_of(upload, "parts/")).json()["received"] == [1, 3]
    answer = client.post(url_of(upload, "complete/"))
    assert (answer.status_code, "number 2" in str(answer.data)) == (400, True)
    send_parts(client, upload, ARCHIVE, [2])
    answer = client.post(url_of(upload, "complete/"))
    assert (answer.status_code, answer.json()["state"]) == (202, "receiving")
    assert client.post(url_of(upload, "complete/")).status_code == 202
    assert client.post(url_of(upload, "parts/"), {"numbers": [1]}).status_code == 410
    direct_uploads.fetch_uploads()
    state = client.get(url_of(upload)).json()
    assert (state["state"], state["version"]) == ("complete", 1)
    assert state["sha256"] == hashlib.sha256(ARCHIVE).hexdigest()
    assert left_in(upload_bucket) == ([], [])
    assert not Allocation.objects.exists()
    assert set(uploads.folder().iterdir()) == {uploads.folder() / uploads.FETCH_LOCK_FILE}


def test_a_bad_archive_and_a_lost_object_do_not_stop_the_upload_of_a_file(client, member, upload_bucket):
    upload, bad, gone = begin(client, FILE), begin(client, DATASET | {"size_bytes": 3}), begin(client, FILE)
    for each in (bad, upload, gone):
        send_parts(client, each, b"abc", [1])
        assert client.post(url_of(each, "complete/")).status_code == 202
    s3.delete_object(upload_bucket, direct_uploads._object_key(Upload.objects.get(key=gone["id"])))
    tasks.resume_imports()  # sends a fetch, which no worker carries out here
    direct_uploads.fetch_uploads()
    folder = selectors.workspace_folder(selectors.workspace_named(member.organization, "code"))
    assert (folder / "src/data.bin").read_bytes() == b"abc"
    assert client.get(url_of(bad)).json()["error"]["code"] == "bad_archive"
    assert client.get(url_of(gone)).json()["error"]["code"] == "upload_ended"
    assert left_in(upload_bucket) == ([], [])


def test_a_fetch_continues_after_a_crash(client, upload_bucket, monkeypatch):
    upload = begin(client, DATASET)
    send_parts(client, upload, ARCHIVE, [1, 2, 3])
    row = Upload.objects.get()
    # As if the process had died after it joined the parts.
    s3.complete_multipart(upload_bucket, direct_uploads._object_key(row), row.multipart_id,
                          direct_uploads._complete_parts(row))  # fmt: skip
    assert client.post(url_of(upload, "complete/")).status_code == 202
    # As if another process had died after it fetched 1000 bytes.
    path = uploads.folder() / row.key.hex
    path.write_bytes(ARCHIVE[:1000])
    offsets = []
    opened = s3.open_object
    monkeypatch.setattr(s3, "open_object", lambda *args, offset: offsets.append(offset) or opened(*args, offset=offset))
    with direct_uploads._fetch_lock() as is_free:
        assert is_free
        direct_uploads.fetch_uploads()  # another process fetches
        assert offsets == []
    direct_uploads.fetch_uploads()
    assert offsets == [1000]
    assert client.get(url_of(upload)).json()["sha256"] == hashlib.sha256(ARCHIVE).hexdigest()


def test_invalid_requests_and_other_protocols_are_refused(client, member, settings):
    upload = begin(client, FILE)
    for numbers in ([0], [2], [], [1] * 101):  # there is one part, and at most 100 may be asked for
        assert client.post(url_of(upload, "parts/"), {"numbers": numbers}).status_code == 400
    headers = {"Tus-Resumable": "1.0.0", "Upload-Offset": "0"}
    assert client.patch(
        url_of(upload), b"abc", content_type="application/offset+octet-stream", headers=headers
    ).status_code == 403  # fmt: skip
    url = client.post(url_of(upload, "parts/"), {"numbers": [1]}).json()["results"][0]["url"].partition("?")[0]
    assert url.endswith(f"/trainyard-uploads/{member.organization_id}/{Upload.objects.get().key.hex}")
    for values, status in (
        ({"size_bytes": 0}, 400), ({"purpose": "part"}, 400), ({"name": "missing"}, 404), ({"path": "../x"}, 400),
        ({"size_bytes": 10**15}, 413),
    ):  # fmt: skip
        assert client.post(f"{ROOT}direct/", FILE | values).status_code == status, values
    settings.UPLOAD_BUCKET_SECRET_ACCESS_KEY = "wrong"
    assert client.post(f"{ROOT}direct/", FILE).json()["code"] == "bucket_unavailable"
    settings.UPLOAD_BUCKET = ""
    assert client.post(f"{ROOT}direct/", FILE).status_code == 400
    assert (Upload.objects.count(), Allocation.objects.count()) == (1, 1)


def test_what_is_cancelled_expired_or_abandoned_leaves_the_bucket(client, upload_bucket):
    cancelled, expired, kept = (begin(client, FILE) for _number in range(3))
    key = direct_uploads._object_key(Upload.objects.get(key=kept["id"]))
    assert client.delete(url_of(cancelled), headers={"Tus-Resumable": "1.0.0"}).status_code == 204
    assert len(left_in(upload_bucket)[1]) == 2
    Upload.objects.filter(key=expired["id"]).update(expires_at=timezone.now() - timedelta(seconds=1))
    seaweedfs.put(upload_bucket, f"{direct_uploads._prefix()}1/{'0' * 32}", b"of a crash")
    outside = direct_uploads._prefix().replace("trainyard-uploads/", "other")  # beside the folder of uploads
    seaweedfs.put(upload_bucket, outside, b"the operator's")
    garbage_collection.collect()
    assert left_in(upload_bucket) == ([], [key])
    assert seaweedfs.keys(upload_bucket, outside) == ([outside], [])


def test_the_server_reads_the_bodies_of_its_requests():
    """Only bodies with bytes of uploads are streams, which a view reads itself."""
    for path in ("direct/", f"{'0' * 8}-0000-0000-0000-{'0' * 12}/parts/"):
        assert not UPLOAD_PATHS["POST"].fullmatch(ROOT + path)
    assert UPLOAD_PATHS["POST"].fullmatch(f"{ROOT}{'0' * 8}-0000-0000-0000-{'0' * 12}/")
