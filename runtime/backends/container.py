"""The root folder of a container image as the root of a sandbox, for runs in a customer's own image.

The image is hostile: its folders may be links, and its programs may be anything. So bubblewrap never mounts anything
into a folder of the image. The sandbox's root, /etc and /opt are bubblewrap's own, and get the image's entries one by
one, all read-only. A link of the image is created anew and never followed from outside.

The launcher does not trust the image either. It runs with the machine's own interpreter and libraries, which lie at
`HOST_TARGET`, and loads nothing of the image. So what it reports is as true as in a built-in image, and the same rules
decide who pays. Only the ranks run programs of the image. Standard library only: supervisors on Slurm's compute nodes
import this.
"""

from __future__ import annotations

import importlib
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HOST_TARGET = "/opt/trainyard/host"
"""The folder in the sandbox that holds the machine's interpreter and libraries, at their paths below it."""
MAX_ENTRIES = 1000
"""How many entries /, /etc and /opt of an image may have in total, since each becomes a mount. Images of whole systems
have about 200."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of an image that sets none, as in container runtimes."""
LAUNCHER_ENVIRONMENT = {
    "PATH": DEFAULT_PATH,
    "HOME": "/tmp",  # noqa: S108 - the sandbox's own, not the host's
    # The launcher reads neither a locale nor a configuration of OpenSSL, which could name libraries, from the image.
    "LC_ALL": "C",
    "OPENSSL_CONF": "/dev/null",
}
"""The environment of the launcher. It has no variable of the image, such as LD_PRELOAD."""
MAX_ARGUMENT_BYTES = 1 << 20
"""How many bytes `root_arguments` may have in total, since the image's links may have long targets. The kernel allows
2 MiB for all arguments and variables of a program. The sandbox's other arguments and its variables need far less than
the second MiB."""
_LAUNCHER_MODULES = ("ctypes", "decimal", "hashlib", "shutil")
"""Modules that the launcher imports and that load further libraries, such as libffi, libmpdec, libcrypto and zlib."""
_SPLIT_FOLDERS = ("etc", "opt")
"""Folders below / in which the platform has entries of its own."""
_OWN_FOLDERS = frozenset({"dev", "proc", "sys", "tmp", "trainyard"})
"""Folders below / that the sandbox fills itself."""
_OWN_ENTRIES = {
    # ld.so.preload stays missing: the dynamic linker of the launcher would load the libraries that it names.
    "etc": frozenset({"group", "hosts", "ld.so.preload", "mtab", "nsswitch.conf", "passwd", "resolv.conf"}),
    "opt": frozenset({"trainyard"}),
}
"""Entries of `_SPLIT_FOLDERS` that are the platform's, or missing; the image's entries of these names are left out."""
_MAX_LINKS = 40
"""How many links one path may contain, as in the kernel."""
_LOADER = re.compile(r"ld[-.].*so")
"""The name of the dynamic linker of glibc, such as ld-linux-x86-64.so.2 or ld-2.28.so."""


@dataclass(frozen=True)
class Container:
    """An unpacked image. `root` is its root folder on this machine, and `python` the path of its Python below `root`.

    `environment` has the variables that the image sets for its processes.
    """

    root: Path
    python: str
    environment: Mapping[str, str]

    def rank_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the ranks. `environment` is what ranks in a built-in image would get.

        Its PATH, LANG and SSL_CERT_FILE describe this machine's system. The image's own replace them.
        """
        platform_variables = {
            name: value for name, value in environment.items() if name not in {"PATH", "LANG", "SSL_CERT_FILE"}
        }
        return {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", **self.environment, **platform_variables}


def root_arguments(root: Path, targets: Sequence[str]) -> list[str]:
    """Return bubblewrap's arguments that fill the sandbox's root from an image's root folder.

    `targets` are the paths of later mounts. The image's folders below / that contain such a path are left out, so that
    no link of the image lies on the way to it.
    """
    paths = [PurePosixPath(target) for target in targets]
    hidden = _OWN_FOLDERS | {path.parts[1] for path in paths}
    args: list[str] = []
    for name in _SPLIT_FOLDERS:
        args += ["--dir", f"/{name}"]
    for name in _names(root):
        if name not in _SPLIT_FOLDERS and name not in hidden:
            args += _entry_arguments(root / name, f"/{name}")
    for folder in _SPLIT_FOLDERS:
        # Entries of this folder on the way to a later mount, which hides them.
        hidden_entries = {part for path in paths if path.parts[1] == folder for part in path.parts[2:3]}
        for name in _names(root / folder):
            if name not in _OWN_ENTRIES[folder] | hidden_entries:
                args += _entry_arguments(root / folder / name, f"/{folder}/{name}")
    return args


def count_entries(root: Path) -> int:
    """Return how many entries of the image `root_arguments` considers; compare it with MAX_ENTRIES."""
    return sum(len(_names(folder)) for folder in (root, *(root / name for name in _SPLIT_FOLDERS)))


def count_argument_bytes(root: Path) -> int:
    """Return how many bytes `root_arguments` have as arguments of a program; compare it with MAX_ARGUMENT_BYTES.

    Without targets, since these only leave entries of the image out.
    """
    return sum(len(os.fsencode(word)) + 1 for word in root_arguments(root, []))


def find_program(root: Path, names: Sequence[str], search_path: str) -> str:
    """Return the path in the image of the first program with one of these names; "" if there is none.

    A link to an absolute path is looked up below `root`, as the sandbox will see it, and never on this machine.
    """
    for name in names:
        for folder in search_path.split(":"):
            path = PurePosixPath(folder, name)
            if path.is_absolute() and _is_program(root, path):
                return str(path)
    return ""


def host_interpreter() -> tuple[list[str], list[str]]:
    """Return the command that starts this process's interpreter in a sandbox, and bubblewrap's arguments for it.

    The command names the machine's dynamic linker: at the path where the interpreter expects one, the sandbox has none
    or the image's. Raises OSError if this machine's interpreter is not linked dynamically to glibc, or has loaded a
    library that the sandbox lacks: in its place, the linker might load a library of the image.
    """
    executable = Path(sys.executable).resolve()
    prefix = executable.parent.parent
    libraries = _loaded_libraries()
    loader = next((path for path in libraries if _LOADER.match(path.name)), None)
    if loader is None:
        raise OSError("This machine's Python has no dynamic linker of glibc.")
    sources = [Path("/usr")]
    # On systems where /lib and /lib64 are no links into /usr, they hold the linker and libraries.
    sources += [folder for folder in map(Path, ("/lib", "/lib64")) if folder.is_dir() and not folder.is_symlink()]
    if not any(prefix.is_relative_to(source) for source in sources):
        if prefix == Path("/"):
            raise OSError(f"This machine's Python is {executable}, so its folder is the whole machine.")
        sources.append(prefix)
    for library in libraries:
        if not any(library.is_relative_to(source) for source in sources):
            raise OSError(
                f"This machine's Python has loaded {library}, which lies neither below /usr nor below {prefix}. Own "
                "images need a Python whose libraries all lie there, such as the system's."
            )
    mounts: list[str] = []
    for source in sources:
        mounts += ["--ro-bind", str(source), f"{HOST_TARGET}{source}"]
    # The interpreter's own libraries come first: a system's may have the same names.
    folders = dict.fromkeys([prefix / "lib", *(path.parent for path in libraries)])
    search_path = ":".join(f"{HOST_TARGET}{folder}" for folder in folders)
    # The linker's cache (/etc/ld.so.cache) is the image's, so it is not used. The linker also searches its default
    # folders, which are the image's too. That is why the loop above refuses libraries outside `sources`.
    command = [f"{HOST_TARGET}{loader}", "--inhibit-cache", "--library-path", search_path]
    # A library or extension module may name folders itself (DT_RPATH, DT_RUNPATH). In the sandbox these are the
    # image's, and the linker prefers DT_RPATH to the library path, so it must ignore them. "" is the interpreter.
    modules = sorted((prefix / "lib").glob("python3*/lib-dynload/*.so"))
    command += ["--inhibit-rpath", ":".join(["", *(f"{HOST_TARGET}{path}" for path in [*libraries, *modules])])]
    return [*command, f"{HOST_TARGET}{executable}", "-X", "utf8"], mounts


def _names(folder: Path) -> list[str]:
    """Return the names in a folder of the image, sorted; none if it is a link or missing."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir())


def _entry_arguments(source: Path, target: str) -> list[str]:
    """Return the arguments that show one entry of the image at `target`; none for anything but a file, folder or link.

    The caller has checked that the folder of `source` is no link.
    """
    mode = source.lstat().st_mode
    if stat.S_ISLNK(mode):
        return ["--symlink", str(source.readlink()), target]
    return ["--ro-bind", str(source), target] if stat.S_ISDIR(mode) or stat.S_ISREG(mode) else []


def _is_program(root: Path, path: PurePosixPath) -> bool:
    """Return whether a path in the image leads to a file that may be executed."""
    resolved = _resolve(root, path)
    if resolved is None:
        return False
    try:
        mode = resolved.lstat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and bool(mode & 0o111)


def _resolve(root: Path, path: PurePosixPath) -> Path | None:
    """Return where a path in the image leads, with all links resolved as inside the image; None for a loop."""
    pending = list(reversed(path.parts[1:]))
    current: list[str] = []
    links = 0
    while pending:
        part = pending.pop()
        if part == "..":
            current = current[:-1]
            continue
        entry = root.joinpath(*current, part)
        if not entry.is_symlink():
            current.append(part)
            continue
        links += 1
        if links > _MAX_LINKS:
            return None
        target = PurePosixPath(entry.readlink())
        if target.is_absolute():
            current = []
        # The first part of an absolute path is its root, "/" or "//": joined to `root`, it would leave the image.
        pending += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return root.joinpath(*current)


def _loaded_libraries() -> list[Path]:
    """Return the paths of the libraries that this process and the launcher load, and of the dynamic linker.

    Extension modules are left out: Python finds them by their paths, not by the linker's search.
    """
    for name in _LAUNCHER_MODULES:
        importlib.import_module(name)
    paths: dict[Path, None] = {}  # a set in the order of /proc/self/maps
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and ".so" in fields[5]:
            paths[Path(fields[5])] = None
    return [path for path in paths if "lib-dynload" not in path.parts and "site-packages" not in path.parts]
