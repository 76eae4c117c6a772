"""A real S3 server: SeaweedFS, which the tests start on free ports."""

import json
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from storage import s3
from tests.console.processes import free_port, wait_for

WEED = Path(sys.executable).with_name("weed")
IDENTITY = {
    "name": "tests",
    "credentials": [{"accessKey": "key-id", "secretKey": "key-secret"}],
    "actions": ["Admin", "Read", "Write", "List"],
}


@contextmanager
def serving(folder):
    """Yield a bucket of a server that runs until the block ends."""
    (folder / "data").mkdir(parents=True)
    (folder / "s3.json").write_text(json.dumps({"identities": [IDENTITY]}))
    port = free_port()
    options = {
        "dir": folder / "data", "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "master.volumeSizeLimitMB": 64,
        "volume.max": 20, "s3": "true", "s3.port": port, "s3.config": folder / "s3.json", "s3.port.grpc": free_port(),
        "s3.port.lance": 0, "s3.port.iceberg": 0,  # 0: off; by default both listen on a fixed port
    }  # fmt: skip
    for part in ("master", "volume", "filer"):
        options |= {f"{part}.port": free_port(), f"{part}.port.grpc": free_port()}
    command = [WEED, "server", *(f"-{name}={value}" for name, value in options.items())]
    bucket = s3.Bucket(f"http://127.0.0.1:{port}", "tests", "us-east-1", "key-id", "key-secret", allows_private=True)
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process:
        try:
            wait_for(lambda: _has_bucket(bucket))
            yield bucket
        finally:
            process.kill()  # its data is thrown away, and a clean stop takes 10 s


def _has_bucket(bucket):
    """Create the bucket. Return whether it exists and stores objects."""
    with suppress(OSError, s3.S3Error):
        with s3._open_response(bucket, "PUT"):  # refused if an earlier call created it, but could not store the object
            pass
        put(bucket, "ready", b"1")  # its volumes come a moment later
        return True
    return False


def put(bucket, key, content):
    """Store an object."""
    with s3._open_response(bucket, "PUT", key, body=content) as response:
        if response.status != 200:
            raise s3.S3Error(response.status)


def keys(bucket, prefix=""):
    """The keys of the objects and of the unfinished multipart uploads."""
    objects = [item.key for page in s3.list_objects(bucket, prefix) for item in page]
    return objects, [key for key, _id in s3.list_multiparts(bucket, prefix)]
