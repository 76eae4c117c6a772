"""A workspace, a workspace's folder with secrets beside it, and a bucket of a real S3 server."""

import secrets

import pytest

from tests import seaweedfs
from tests.factories.storage import WorkspaceFactory
from tests.registry import registry

__all__ = ["registry"]


@pytest.fixture
def root(tmp_path):
    """A workspace's folder. Files with the word "secret" beside it must be neither read nor changed."""
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("secret")
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture
def workspace(owner):
    """An empty workspace of the owner's organization."""
    return WorkspaceFactory(organization=owner.organization, name="code")


@pytest.fixture
def scratch(tmp_path):
    """A folder for unfinished things."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """A bucket of a real S3 server. Tests use prefixes of their own."""
    with seaweedfs.serving(tmp_path_factory.mktemp("seaweedfs")) as bucket:
        yield bucket


@pytest.fixture
def upload_bucket(s3_server, settings):
    """The bucket as the operator's bucket for direct uploads, below a prefix of the test."""
    prefix = secrets.token_hex(8)
    settings.UPLOAD_BUCKET, settings.UPLOAD_BUCKET_ENDPOINT = f"{s3_server.name}/{prefix}", s3_server.endpoint
    settings.UPLOAD_BUCKET_ACCESS_KEY_ID = s3_server.access_key_id
    settings.UPLOAD_BUCKET_SECRET_ACCESS_KEY = s3_server.secret_access_key
    return s3_server
