"""`python .ci/fetch_kustomize.py FILE`: kustomize from Debian's mirror, for machines without kubectl.

The one rule: the package is the one named here, by its checksum. Debian 13 keeps it; it needs only the C library of
Debian 12 or later. Does nothing where there is a kubectl, a kustomize, or the file already. Standard library alone.
"""

import hashlib
import io
import platform
import shutil
import sys
import tarfile
import urllib.request
from pathlib import Path

NAME = "pool/main/k/kustomize/kustomize_5.6.0+ds-1+b2_amd64.deb"
SHA256 = "552bbe5563b522685b10f75a9a226bfbee9778fc313b205d595fdbb7e9c70e33"
MIRRORS = ("http://deb.debian.org/debian", "https://snapshot.debian.org/archive/debian/20250915T000000Z")
MEMBER = "./usr/bin/kustomize"
AR_HEADER = 60


def fetched() -> bytes:
    """The package, from whichever mirror has it."""
    for mirror in MIRRORS:
        try:
            with urllib.request.urlopen(f"{mirror}/{NAME}", timeout=60) as answer:  # noqa: S310  # constants of ours
                package: bytes = answer.read()
        except OSError as error:
            print(f"{mirror}: {error}")
            continue
        if hashlib.sha256(package).hexdigest() == SHA256:
            return package
        print(f"{mirror}: another file than it was")
    sys.exit("No mirror has kustomize.")


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
        sys.exit("Only for x86-64: install kubectl or kustomize yourself.")
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
