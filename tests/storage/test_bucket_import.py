"""Imports from a real bucket: objects and prefixes, credentials from secrets, continuation, what is refused."""

import json
import secrets

import pytest

from console.accounts.models import Quota
from console.core import connections
from console.core.errors import InvalidInput
from storage import bucket_import, garbage_collection, imports, s3, secret_store, selectors
from tests import seaweedfs
from tests.factories.storage import DatasetFactory
from tests.storage.archives import tar_of
from tests.storage.refusals import refused_fields

pytestmark = [pytest.mark.django_db, pytest.mark.xdist_group("seaweedfs")]
FILES = {"train/a b+é.csv": b"1,2\n" * 5000, "train/deep/er/x": bytes(range(256)), "README.md": b"", "n" * 150: b"long"}
"""Names that must be escaped in a URL, an empty file, and a name that is too long for a plain header of a tar."""
CREDENTIALS = {"access_key_id_secret": "KEY_ID", "secret_access_key_secret": "KEY"}


@pytest.fixture
def dataset(owner):
    # A secret that was copied from a file may end with a line break, which an import ignores.
    for name, value in (("KEY_ID", "key-id"), ("KEY", "key-secret\n"), ("WRONG", "wrong")):
        secret_store.save_secret(organization=owner.organization, name=name, value=value)
    return DatasetFactory(organization=owner.organization, name="digits")


@pytest.fixture
def address(s3_server, settings, monkeypatch):
    """The address of a prefix with FILES that no other test uses, on a server that imports may reach."""
    settings.S3_IMPORT_ENDPOINTS = [f"{s3_server.endpoint}?region=eu-1"]
    settings.S3_IMPORT_PRIVATE_ADDRESSES = True
    monkeypatch.setattr(bucket_import.time, "sleep", lambda _seconds: None)
    prefix = secrets.token_hex(8)
    for name, content in FILES.items():
        seaweedfs.put(s3_server, f"{prefix}/{name}", content)
    seaweedfs.put(s3_server, f"{prefix}/empty/", b"")  # the mark of an empty folder, which is not imported
    return f"s3://{s3_server.name}/{prefix}"


def key_of(address, name):
    return f"{address.rpartition('/')[2]}/{name}"


def start(dataset, url, **values):
    return imports.start_import(dataset=dataset, user=None, url=url, **(CREDENTIALS | values))


def imported(dataset, url, **values):
    row = start(dataset, url, **values)
    imports.run_import(row)
    row.refresh_from_db()
    assert [path.name for path in imports.folder().iterdir()] == [imports.LOCK_FILE]
    return row


def contents(version):
    folder = selectors.version_folder(version)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_prefix_an_archive_and_a_file_are_imported(address, s3_server, dataset, monkeypatch):
    connects = []
    connect = connections._Connection.connect
    monkeypatch.setattr(connections._Connection, "connect", lambda self: connects.append(self) or connect(self))
    row = imported(dataset, address)
    assert len(connects) == 3  # to ask for an object of this name, to list the prefix, to read all objects
    assert contents(row.version) == FILES
    assert (row.error, row.received_bytes <= row.size_bytes) == ("", True)
    assert contents(imported(dataset, f"{address}/train/").version) == {
        "a b+é.csv": b"1,2\n" * 5000,
        "deep/er/x": bytes(range(256)),
    }
    seaweedfs.put(s3_server, key_of(address, "data.tar"), tar_of({"x/y": b"1"}))
    assert contents(imported(dataset, f"{address}/data.tar").version) == {"x/y": b"1"}
    assert contents(imported(dataset, f"{address}/train/a b+é.csv").version) == {"a b+é.csv": FILES["train/a b+é.csv"]}


def test_a_transfer_continues_at_any_byte(address, dataset, monkeypatch):
    """In a header, in the content and in the padding: an import that a crash ended has received any number of bytes."""
    whole = imported(dataset, address).version
    row = start(dataset, address)
    requests = []
    opened = s3.open_object
    monkeypatch.setattr(s3, "open_object", lambda *a, **v: requests.append(v["offset"]) or opened(*a, **v))
    bucket, key = bucket_import._bucket_and_key(row)

    def content(offset):
        with imports._listing_of(row).open() as lines, s3.connect(bucket) as connection:
            return b"".join(bucket_import._content(bucket, connection, lines, offset))

    with imports.Reservation(dataset.organization, label="x") as reservation:
        bucket_import._store_listing(row, bucket, key, imports._listing_of(row), reservation)
        tar = content(0)
        assert len(tar) == row.size_bytes
        for offset in (0, 100, 600, 1100, 5000, len(tar) - 1500, len(tar) - 700, len(tar) - 1, len(tar)):
            assert content(offset) == tar[offset:], offset
    requests.clear()
    imports._path_of(row).write_bytes(tar[: len(tar) // 2])
    imports.run_import(row)
    row.refresh_from_db()
    assert row.version.sha256 == whole.sha256
    assert len(requests) < len(FILES)  # none for an object that had been received whole
    assert requests[0] > 0  # the first one continues in the middle of its object


def test_a_cut_connection_is_tried_again_and_a_changed_object_ends_the_import(address, s3_server, dataset, monkeypatch):
    opened, cuts = s3.open_object, [OSError(), s3.S3Error(503)]

    def cut(*args, **values):
        if cuts:
            raise cuts.pop()
        return opened(*args, **values)

    monkeypatch.setattr(s3, "open_object", cut)
    assert contents(imported(dataset, address).version) == FILES
    row = start(dataset, address)
    stored = bucket_import._store_listing

    def change(*args):
        stored(*args)
        seaweedfs.put(s3_server, key_of(address, "train/deep/er/x"), bytes(256))

    monkeypatch.setattr(bucket_import, "_store_listing", change)
    imports.run_import(row)
    row.refresh_from_db()
    assert (row.version, row.error) == (None, bucket_import.OBJECT_CHANGED)


def test_wrong_credentials_and_missing_objects_buckets_and_secrets_end_an_import(address, dataset):
    refused = bucket_import.BUCKET_REFUSED
    assert imported(dataset, address, secret_access_key_secret="WRONG").error == refused
    assert imported(dataset, address, access_key_id_secret="", secret_access_key_secret="").error == refused
    assert imported(dataset, f"{address}/missing/").error == bucket_import.NO_OBJECTS
    assert imported(dataset, "s3://no-such-bucket/x/").error == bucket_import.NO_OBJECTS
    row = start(dataset, address)
    secret_store.delete_secret(secret=secret_store.secret_named(dataset.organization, "KEY"))
    imports.run_import(row)
    row.refresh_from_db()
    assert "KEY" in row.error


def test_a_bucket_that_the_operator_does_not_allow_is_not_reached(address, dataset, settings, monkeypatch):
    settings.S3_IMPORT_PRIVATE_ADDRESSES = False
    monkeypatch.setattr(connections.socket, "create_connection", lambda *_a, **_o: pytest.fail("connected"))
    assert imported(dataset, address).error == imports.NOT_ALLOWED
    row = start(dataset, address)
    settings.S3_IMPORT_ENDPOINTS = ["https://s3.example.com"]
    imports.run_import(row)
    row.refresh_from_db()
    assert row.error == imports.NOT_ALLOWED


def test_invalid_values_are_refused_at_their_field(address, dataset):
    for field, value in (
        ("url", "s3://b/x"), ("url", "s3://UPPER/x"), ("url", "s3://tests/" + "x" * 1025), ("url", "s3://../tests"),
        ("endpoint", "http://169.254.169.254"), ("access_key_id_secret", "MISSING"), ("secret_access_key_secret", ""),
    ):  # fmt: skip
        assert refused_fields(start, dataset=dataset, **({"url": address} | {field: value})) == [field], value


def test_imports_are_off_by_default_and_within_the_quota(address, dataset, settings):
    # More than the bytes of FILES, but less than they count with their folders.
    Quota.objects.update(max_storage_bytes=selectors.storage_used(dataset.organization) + 40_000)
    row = imported(dataset, address)
    assert (row.version, "quota" in row.error) == (None, True)
    settings.S3_IMPORT_ENDPOINTS = []  # the default
    with pytest.raises(InvalidInput):
        start(dataset, address)


def test_an_import_is_started_over_the_api_and_on_the_page(address, dataset, api, owner, client):
    body = {"url": address, "endpoint": next(iter(bucket_import.allowed_endpoints()))} | CREDENTIALS
    answer = api(owner).post("/api/v1/datasets/digits/imports/", body)
    assert (answer.status_code, answer.json()["endpoint"]) == (201, body["endpoint"])
    assert "key-secret" not in json.dumps(answer.json())
    (imports.folder() / (imports._name_of(answer.json()["id"]) + imports.LISTING_SUFFIX)).write_text("x")
    garbage_collection.collect()
    assert len(list(imports.folder().iterdir())) == 1  # the open import's
    client.force_login(owner.user)
    page = client.get("/datasets/d/digits/").content.decode()
    assert "s3://" in page
    assert '<option value="KEY">' in page
    assert client.post("/datasets/d/digits/import/", body).status_code == 302
    assert dataset.imports.count() == 2
