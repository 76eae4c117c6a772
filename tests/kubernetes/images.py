"""The images that the fake cluster's nodes can pull, and how pulling them fails.

The one rule: an image is folders of this machine and an environment; nothing is downloaded.
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
TORCH = "registry.example.com/trainyard/pytorch:1"
_REFERENCE = re.compile(r"[a-z0-9./_-]+(:[0-9]+/[a-z0-9./_-]+)?(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?")


class PullFailedError(Exception):
    """Why the image is not to be had. `reason` is what the kubelet says while it waits."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Image:
    """Folders that a container of the image sees, read-only, where they are; its own environment."""

    folders: tuple[Path, ...]
    environment: dict[str, str]


def _of_interpreter(prefix: Path, *more: Path) -> Image:
    folders = (prefix, *more)
    path = ":".join(f"{folder}/bin" for folder in reversed(folders)) + ":/usr/local/bin:/usr/bin:/bin"
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    return Image(folders, {"PATH": path, "LANG": "C.UTF-8", "PYTHON_VERSION": version})


def python_image() -> Image:
    """The interpreter that runs the tests, without what they installed."""
    return _of_interpreter(Path(os.path.realpath(sys.base_prefix)))


def built_image(folder: Path) -> Image:
    """An image that `manage.py build_image` made."""
    return _of_interpreter(Path(os.path.realpath(sys.base_prefix)), folder)


def empty_image() -> Image:
    """An image with nothing in it that we need."""
    return Image((), {"PATH": "/nowhere"})


@dataclass
class Registry:
    """What can be pulled. `passwords` are of hosts that want some; `dead` hosts do not answer."""

    images: dict[str, Image] = field(default_factory=lambda: {PYTHON: python_image()})
    passwords: dict[str, str] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)

    def pull(self, reference: str, secrets: list[Object]) -> Image:
        """The image. Raises PullFailedError, in containerd's words."""
        if not _REFERENCE.fullmatch(reference):
            raise PullFailedError(
                "InvalidImageName", f'Failed to apply default image tag "{reference}": invalid reference format'
            )
        name = full_name(reference)
        host = name.partition("/")[0]
        failed = f'failed to pull and unpack image "{name}": failed to resolve reference "{name}"'
        if host in self.dead:
            message = (
                f'{failed}: failed to do request: Head "https://{host}/v2/": dial tcp: lookup {host}: no such host'
            )
            raise PullFailedError("ErrImagePull", message)
        if host in self.passwords and self.passwords[host] not in _passwords(host, secrets):
            message = f"{failed}: pull access denied, repository does not exist or may require authorization: "
            raise PullFailedError("ErrImagePull", message + "authorization failed: 401 Unauthorized")
        if name not in self.images:
            raise PullFailedError("ErrImagePull", f"{failed}: {name}: not found")
        return self.images[name]


def full_name(reference: str) -> str:
    """The reference with its host and tag."""
    first, slash, _rest = reference.partition("/")
    if not slash:
        reference = f"docker.io/library/{reference}"
    elif "." not in first and ":" not in first and first != "localhost":
        reference = f"docker.io/{reference}"
    return reference if ":" in reference.rpartition("/")[2] or "@" in reference else f"{reference}:latest"


def _passwords(host: str, secrets: list[Object]) -> set[str]:
    found = set()
    for secret in secrets:
        told = json.loads(base64.b64decode(secret["data"][".dockerconfigjson"]))
        entry = told["auths"].get(host) or told["auths"].get(f"https://{host}")
        if entry:
            found.add(entry.get("password") or base64.b64decode(entry["auth"]).decode().partition(":")[2])
    return found
