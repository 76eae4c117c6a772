"""`python .ci/fetch_kustomize.py FILE`: kustomize from the mirror that apt uses here, for machines without kubectl.

The one rule: the package is the one named here, by its checksum, whoever hands it out. Debian 13 keeps it; it needs
only the C library of Debian 12 or later. Does nothing where there is a kubectl, a kustomize, or the file already.
Standard library alone.
"""

from __future__ import annotations

import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

NAME = "pool/main/k/kustomize/kustomize_5.6.0+ds-1+b2_amd64.deb"
SHA256 = "552bbe5563b522685b10f75a9a226bfbee9778fc313b205d595fdbb7e9c70e33"
MEMBER = "./usr/bin/kustomize"
AR_HEADER = 60
INSTEAD = "Install kubectl or kustomize yourself."


def mirrors() -> list[str]:
    """Where apt gets Debian's packages on this machine, in its own order; empty where there is no apt."""
    asked = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.partition(" ") for line in told.splitlines()]
    return list(dict.fromkeys(uri.strip().rstrip("/") for origin, _space, uri in lines if origin == "Debian"))


def fetched() -> bytes:
    """The package, from whichever mirror has it. Ends the program where none does."""
    for mirror in mirrors():
        try:
            with urllib.request.urlopen(f"{mirror}/{NAME}", timeout=60) as answer:  # noqa: S310  # apt's own setting
                package: bytes = answer.read()
        except (OSError, ValueError) as error:
            print(f"{mirror}: {error}")
            continue
        if hashlib.sha256(package).hexdigest() == SHA256:
            return package
        print(f"{mirror}: another file than it was")
    sys.exit(f"No mirror that apt knows here has kustomize. {INSTEAD}")


def members(package: bytes) -> dict[str, bytes]:
    """The parts of an `ar` archive, which a Debian package is."""
    found, position = {}, 8
    while position < len(package):
        header = package[position : position + AR_HEADER]
        size = int(header[48:58])
        begin = position + AR_HEADER
        found[header[:16].decode().strip().rstrip("/")] = package[begin : begin + size]
        position = begin + size + size % 2
    return found


def main(target: Path) -> None:
    """Have a kustomize at `target`, unless there is something as good."""
    if target.exists() or shutil.which("kubectl") or shutil.which("kustomize"):
        print("There is a kubectl or a kustomize.")
        return
    if platform.machine() != "x86_64":
        sys.exit(f"The package is for x86-64 alone. {INSTEAD}")
    data = members(fetched())["data.tar.xz"]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        fresh = target.with_suffix(".new")
        with tar.extractfile(MEMBER) as program, fresh.open("wb") as file:
            shutil.copyfileobj(program, file)
    fresh.chmod(0o755)
    fresh.replace(target)
    print(f"kustomize is at {target}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
