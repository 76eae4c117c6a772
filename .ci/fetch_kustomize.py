"""`python .ci/fetch_kustomize.py FILE`: download kustomize from apt's Debian mirror, for machines without kubectl.

The package is pinned by its checksum, so any mirror can be used. It needs the C library of Debian 12 or later. Does
nothing if there is a kubectl, a kustomize, or the file already. Uses only the standard library.
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

PACKAGE = "pool/main/k/kustomize/kustomize_5.6.0+ds-1+b2_amd64.deb"
"""The package's path on a mirror. It is the version of Debian 13."""
SHA256 = "552bbe5563b522685b10f75a9a226bfbee9778fc313b205d595fdbb7e9c70e33"
PROGRAM = "./usr/bin/kustomize"
"""The path of the program in the package's data.tar.xz."""
# The format of `ar` archives: a magic string, then for each member a header and its content, padded to an even size.
AR_MAGIC = b"!<arch>\n"
AR_HEADER_BYTES = 60
AR_NAME, AR_SIZE = slice(0, 16), slice(48, 58)
"""Where the header has the member's name and size, as text padded with spaces."""
ADVICE = "Install kubectl or kustomize yourself."


def debian_mirrors() -> list[str]:
    """Return the URLs from which apt gets Debian's packages on this machine, in apt's order; empty without apt."""
    command = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.partition(" ") for line in output.splitlines()]
    return list(dict.fromkeys(url.strip().rstrip("/") for origin, _space, url in lines if origin == "Debian"))


def download_package() -> bytes:
    """Return the package, from the first mirror that has it. Exit if none does."""
    for mirror in debian_mirrors():
        try:
            url = f"{mirror}/{PACKAGE}"
            with urllib.request.urlopen(url, timeout=60) as response:  # noqa: S310  # apt's own setting
                package: bytes = response.read()
        except (OSError, ValueError) as error:
            print(f"{mirror}: {error}")
            continue
        if hashlib.sha256(package).hexdigest() == SHA256:
            return package
        print(f"{mirror}: the package has another checksum than {SHA256}")
    sys.exit(f"None of apt's mirrors on this machine has kustomize. {ADVICE}")


def ar_members(archive: bytes) -> dict[str, bytes]:
    """Return the members of an `ar` archive by name. A Debian package is such an archive."""
    members, position = {}, len(AR_MAGIC)
    while position < len(archive):
        header = archive[position : position + AR_HEADER_BYTES]
        name, size = header[AR_NAME].decode().strip().rstrip("/"), int(header[AR_SIZE])
        start = position + AR_HEADER_BYTES
        members[name] = archive[start : start + size]
        position = start + size + size % 2
    return members


def main(target: Path) -> None:
    """Write kustomize to `target`, unless it is there or the machine has kubectl or kustomize."""
    if target.exists() or shutil.which("kubectl") or shutil.which("kustomize"):
        print("kubectl or kustomize is already installed.")
        return
    if platform.machine() != "x86_64":
        sys.exit(f"The package is for x86-64 only. {ADVICE}")
    data = ar_members(download_package())["data.tar.xz"]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        unfinished = target.with_suffix(".new")
        with tar.extractfile(PROGRAM) as program, unfinished.open("wb") as file:
            shutil.copyfileobj(program, file)
    unfinished.chmod(0o755)
    unfinished.replace(target)
    print(f"kustomize is at {target}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
