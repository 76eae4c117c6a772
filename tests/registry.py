"""A real registry of images on loopback, and images that tests write file by file and push to it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.console.processes import wait_for

USER, PASSWORD = "me", "hunter2"
_HTPASSWD = "me:$2b$04$rIkl8fKDnipHnKC7RVuMHeRKS1lPBtM8yQwzby6I059Nrcf/0ZO6G\n"
"""USER, and PASSWORD as bcrypt stores it."""
_START_SECONDS = 20.0
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_UNNEEDED = frozenset({
    "site-packages", "test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data", "__pycache__",
})  # fmt: skip
"""Parts of the standard library that a run does not need."""
_UNNEEDED_LIBRARIES = re.compile(r"X|tcl|tk\d|font|freetype|png|xcb|brotli|bsd|expat")
"""Libraries of tkinter and of other modules that a run does not need."""


class Registry:
    """Debian's docker-registry, whose only user is USER. `host` is its host and port."""

    def __init__(self, program: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.host = f"127.0.0.1:{free.getsockname()[1]}"
        (folder / "htpasswd").write_text(_HTPASSWD)
        configuration = {
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
            "http": {"addr": self.host},
            "auth": {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}},
        }
        (folder / "config.yml").write_text(json.dumps(configuration))  # JSON is YAML
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen([program, "serve", str(folder / "config.yml")], stdout=log, stderr=log)
        self._client = httpx.Client(auth=(USER, PASSWORD), timeout=60, trust_env=False)
        wait_for(self._answers, _START_SECONDS)

    def _answers(self) -> bool:
        try:
            return self._client.get(f"http://{self.host}/v2/").is_success
        except httpx.TransportError:
            return False

    def push(self, name: str, tag: str, layers: list[bytes], **config: object) -> str:
        """Push an image with these layers and this configuration (`Env`, …); return its digest."""
        described = {
            "architecture": "amd64",
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [digest_of(gzip.decompress(layer)) for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": self._push_blob(name, _CONFIG, json.dumps(described).encode()),
            "layers": [self._push_blob(name, _LAYER, layer) for layer in layers],
        }
        content = json.dumps(manifest).encode()
        url = f"http://{self.host}/v2/{name}/manifests/{tag}"
        self._client.put(url, content=content, headers={"Content-Type": _MANIFEST}).raise_for_status()
        return digest_of(content)

    def _push_blob(self, name: str, kind: str, content: bytes) -> dict[str, object]:
        location = self._client.post(f"http://{self.host}/v2/{name}/blobs/uploads/").headers["Location"]
        query = {**httpx.URL(location).params, "digest": digest_of(content)}
        self._client.put(location, params=query, content=content).raise_for_status()
        return {"mediaType": kind, "digest": digest_of(content), "size": len(content)}

    def close(self) -> None:
        """End the registry."""
        self._client.close()
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="session")
def registry(short_folders: Callable[[], Path]) -> Iterator[Registry]:
    """A registry of images on loopback. Tests push the images that they need."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("There is no docker-registry: apt-get install docker-registry.")
    registry = Registry(program, short_folders())
    yield registry
    registry.close()


def digest_of(content: bytes) -> str:
    """Return the digest of a blob."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def file(name: str, content: bytes = b"", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    """Return the entry of a file for `layer`."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    return entry, content


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    """Return the entry of a folder, a link or a device for `layer`. `kind` is a type of `tarfile`."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode = kind, target, 0o755
    return entry, b""


def layer(entries: list[tuple[tarfile.TarInfo, bytes]], root: Path | None = None) -> bytes:
    """Return a layer with the contents of the folder `root` and then these entries."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        if root is not None:
            archive.add(root, ".")
        for entry, content in entries:
            archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), 1, mtime=0)


def write_python(root: Path) -> None:
    """Write a root folder with a Python, /usr/local/bin/python3: a copy of this interpreter and its libraries."""
    name = f"python3.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    library = root / "usr/local/lib" / name
    shutil.copytree(
        base / "lib" / name,
        library,
        ignore=lambda _folder, names: [
            each for each in names if each in _UNNEEDED or each.startswith("config-") or each.endswith((".a", ".pyc"))
        ],
    )
    programs = root / "usr/local/bin"
    programs.mkdir(parents=True)
    shutil.copy2(Path(sys.executable).resolve(), programs / name)
    (programs / "python3").symlink_to(name)
    linked = [programs / name, *library.glob("lib-dynload/*.so")]
    output = subprocess.run(["ldd", *linked], capture_output=True, text=True, check=False).stdout
    found = {*re.findall(r"=> (/\S+)", output), *re.findall(r"^\s+(/\S*ld-\S+)", output, re.MULTILINE)}
    for path in found:
        if not _UNNEEDED_LIBRARIES.search(Path(path).name):
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(os.path.realpath(path), target)
    for folder in ("etc", "tmp", "workspace"):
        (root / folder).mkdir()
