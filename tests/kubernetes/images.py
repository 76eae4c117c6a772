"""The images that the fake cluster's nodes can pull, and how pulls fail.

An image is a set of folders of this machine and an environment; nothing is downloaded.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.resources import Object

PYTHON = "docker.io/library/python:3.11"
"""The image that every node has."""
FAKE_TORCH_IMAGE = "registry.example.com/trainyard/pytorch:1"
"""The reference under which a test adds the image with PyTorch to the registry."""
_REFERENCE = re.compile(r"[a-z0-9./_-]+(:[0-9]+/[a-z0-9./_-]+)?(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?")


class PullFailedError(Exception):
    """A pull failed. `reason` is the container's waiting reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Image:
    """The folders that a container sees, read-only and at the same path, and its environment."""

    folders: tuple[Path, ...]
    environment: dict[str, str]


def python_image(*built: Path) -> Image:
    """Return an image with this interpreter, but without the tests' packages.

    `built` are folders of built images. They are in the image too, and come first in its PATH.
    """
    folders = (Path(os.path.realpath(sys.base_prefix)), *built)
    path = ":".join(f"{folder}/bin" for folder in reversed(folders)) + ":/usr/local/bin:/usr/bin:/bin"
    return Image(folders, {"PATH": path, "LANG": "C.UTF-8"})


@dataclass
class Registry:
    """All registries. A host in `passwords` requires that password."""

    images: dict[str, Image] = field(default_factory=lambda: {PYTHON: python_image()})
    passwords: dict[str, str] = field(default_factory=dict)

    def pull(self, reference: str, secrets: list[Object]) -> Image:
        """Return an image. Raises PullFailedError with containerd's messages."""
        if not _REFERENCE.fullmatch(reference):
            message = f'Failed to apply default image tag "{reference}": invalid reference format'
            raise PullFailedError("InvalidImageName", message)
        name = full_name(reference)
        host = name.partition("/")[0]
        problem = ""
        if host in self.passwords and self.passwords[host] not in _passwords(host, secrets):
            problem = "pull access denied, repository does not exist or may require authorization: "
            problem += "authorization failed: 401 Unauthorized"
        elif name not in self.images:
            problem = f"{name}: not found"
        if problem:
            failed = f'failed to pull and unpack image "{name}": failed to resolve reference "{name}"'
            raise PullFailedError("ErrImagePull", f"{failed}: {problem}")
        return self.images[name]


def full_name(reference: str) -> str:
    """Return a reference with its host and tag."""
    first, slash, _rest = reference.partition("/")
    if not slash:
        reference = f"docker.io/library/{reference}"
    elif "." not in first and ":" not in first and first != "localhost":
        reference = f"docker.io/{reference}"
    return reference if ":" in reference.rpartition("/")[2] or "@" in reference else f"{reference}:latest"


def _passwords(host: str, secrets: list[Object]) -> set[str]:
    configs = [json.loads(base64.b64decode(secret["data"][".dockerconfigjson"])) for secret in secrets]
    entries = [config["auths"].get(host) or config["auths"].get(f"https://{host}") for config in configs]
    return {base64.b64decode(entry["auth"]).decode().partition(":")[2] for entry in entries if entry}
