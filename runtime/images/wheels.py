"""Compile wheels of packages that are published as source only, once per machine, and cache them.

The name of a wheel's folder in the cache is a digest of everything that determines the wheel: the recipe's section, the
interpreter and the installed packages. The folder appears by one rename, with complete wheels.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runtime.backends import host
from runtime.errors import RuntimeFault
from runtime.images import uv
from runtime.images.recipes import Compilation, Section

_COMPILER_MEMORY_MIB = 2048
"""Memory that one C++ compiler process needs for torch's headers. The machine's memory, divided by this, limits how
many compilers run at once."""
# The text of a sitecustomize.py, which Python imports when it starts.
_HIDE_CUDA = """\
import os.path
exists = os.path.exists
# Torch looks for CUDA in /usr/local/cuda. If it finds a part of a toolkit, Horovod's build fails without the rest.
os.path.exists = lambda path: path != "/usr/local/cuda" and exists(path)
"""
RunCommand = Callable[[list[str], Mapping[str, str]], str]
"""Runs a command with additional environment variables and returns its output. Raises ImageBuildFailed."""


class CompilerMissing(RuntimeFault):
    """This machine lacks a compiler or another tool that the wheel needs."""

    code = "compiler_missing"


def build_wheels(
    section: Section, python: Path, *, rebuild: bool = False, run: RunCommand, report_step: Callable[[str], None]
) -> list[str]:
    """Return the paths of the section's wheels, built for the interpreter `python` and its installed packages.

    Uses the cache unless `rebuild` is set. `report_step` is called with the text of each step. Raises CompilerMissing,
    OSError if the cache cannot be written, and the exceptions of `run`.
    """
    if section.compilation is None:
        raise ValueError("this section is not compiled")
    installed_packages = run([uv.executable(), "pip", "freeze", "--python", str(python)], {})
    wheels = cache_folder() / _digest(section, installed_packages)
    if rebuild:
        shutil.rmtree(wheels, ignore_errors=True)
    if not wheels.is_dir():
        _require_tools()
        wheels.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=wheels.parent, prefix=".compiling-") as folder:
            new_wheels = _compile(section, section.compilation, python, Path(folder), run=run, report_step=report_step)
            try:
                new_wheels.rename(wheels)
            except OSError:
                if not wheels.is_dir():  # another process may have compiled the wheels meanwhile
                    raise
    return sorted(map(str, wheels.glob("*.whl")))


def cache_folder() -> Path:
    """Return the user's cache of compiled wheels: `$XDG_CACHE_HOME/trainyard/wheels`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard" / "wheels"


def _digest(section: Section, installed_packages: str) -> str:
    """Return the name of the cache folder. `installed_packages` is the list of the interpreter's packages."""
    # Of this process, since the image's virtual environment uses the same interpreter.
    interpreter = [sys.version, sysconfig.get_platform()]
    return hashlib.sha256(json.dumps([section, installed_packages, interpreter]).encode()).hexdigest()


def _require_tools() -> None:
    missing_tools = [tool for tool in ("g++", "make") if shutil.which(tool) is None]
    if missing_tools:
        raise CompilerMissing(
            f"{' and '.join(missing_tools)} must be installed to compile this image (Debian, Ubuntu: apt-get install "
            "g++ make; Fedora: dnf install gcc-c++ make). Then build it again."
        )


def _compile(
    section: Section,
    compilation: Compilation,
    python: Path,
    folder: Path,
    *,
    run: RunCommand,
    report_step: Callable[[str], None],
) -> Path:
    """Compile the section's wheels in the empty folder `folder`; return the folder of the wheels.

    The other parameters are as in `build_wheels`.
    """
    tools_folder, wheels_folder = folder / "tools", folder / "wheels"
    if compilation.tools:
        report_step(f"Installing build tools: {', '.join(compilation.tools)}")
        # Outside the image, since runs do not need build tools.
        target = ["--python", str(python), "--target", str(tools_folder)]
        run([uv.executable(), "pip", "install", *target, *compilation.tools], uv.environment())
    parallel = max(1, min(int(host.cpus()), host.memory_mib() // _COMPILER_MEMORY_MIB))
    requirements = ", ".join(section.requirements)
    report_step(f"Compiling {requirements}, {parallel} files at a time (takes minutes, only once on this machine)")
    environment = {
        **dict(compilation.environment),
        "CXX": str(_compiler(compilation, folder)),
        "MAKEFLAGS": f"-j{parallel}",
        "PYTHONPATH": str(tools_folder),
        "PATH": os.pathsep.join([str(tools_folder / "bin"), str(python.parent), *_path_without_cuda(folder)]),
    }
    if compilation.cmake_commands:
        toolchain_file = folder / "toolchain.cmake"
        toolchain_file.write_text("\n".join(compilation.cmake_commands))
        environment["CMAKE_TOOLCHAIN_FILE"] = str(toolchain_file)
    tools_folder.mkdir(exist_ok=True)
    (tools_folder / "sitecustomize.py").write_text(_HIDE_CUDA)
    # Unset rather than empty, since torch takes an empty CUDA_HOME for a path.
    unset = ["env", "-u", "CUDA_HOME", "-u", "CUDA_PATH"]
    # pip's own cache keys wheels by name and interpreter only, so it could return a wheel built for another framework.
    command = [
        *unset,
        str(python),
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-cache-dir",
        "--no-deps",
        "--wheel-dir",
        str(wheels_folder),
    ]
    run([*command, *section.options, *section.requirements], environment)
    return wheels_folder


def _path_without_cuda(folder: Path) -> list[str]:
    """Return the folders of PATH, without CUDA's compiler `nvcc`.

    A folder that has it is replaced by a folder of links to its other programs. Wheels are compiled for CPUs, and if
    Horovod's build finds an `nvcc`, it looks for a complete CUDA toolkit and fails.
    """
    folders = []
    for number, directory in enumerate(os.environ.get("PATH", os.defpath).split(os.pathsep)):
        if not Path(directory, "nvcc").exists():
            folders.append(directory)
            continue
        links = folder / f"path-{number}"
        links.mkdir()
        for program in Path(directory).iterdir():
            if not program.name.startswith("nvcc"):
                (links / program.name).symlink_to(program)
        folders.append(str(links))
    return folders


def _compiler(compilation: Compilation, folder: Path) -> Path:
    """Write a shell script that calls g++ with the recipe's changes of arguments; return its path."""
    empty_file = folder / "empty.cc"
    empty_file.touch()
    flags = [*compilation.flags, *((f"*/{name}", str(empty_file)) for name in compilation.emptied_files)]
    wrapper = folder / "c++"
    wrapper.write_text(_wrapper(flags))
    wrapper.chmod(0o755)
    return wrapper


def _wrapper(flags: Sequence[tuple[str, str]]) -> str:
    """Return a shell script that calls g++ with changed arguments.

    `flags` are pairs of a shell pattern and a replacement, as in `Compilation`. An argument that matches a pattern is
    replaced, or dropped if the replacement is "". The replacement of a pattern "" is added as an argument.
    """
    # The loop takes each argument from the front of the list and appends it again, changed or not. `continue` drops it.
    cases = [f"    {old}) {f'word={shlex.quote(new)}' if new else 'continue'} ;;" for old, new in flags if old]
    extra_arguments = " ".join(shlex.quote(new) for old, new in flags if not old)
    return "\n".join(
        [
            "#!/bin/sh",
            "# Calls g++ with the arguments that the recipe changes.",
            "for word; do",
            "  shift",
            '  case "$word" in',
            *cases,
            "  esac",
            '  set -- "$@" "$word"',
            "done",
            f'exec g++ "$@" {extra_arguments}'.rstrip(),
            "",
        ]
    )
