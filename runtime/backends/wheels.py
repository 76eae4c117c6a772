"""Wheels of what is published as source only: compiled once on a machine, then taken from the user's cache.

The one rule: a wheel's place in the cache is the digest of everything that went into it (the section of the recipe, the
interpreter, what is installed beside it), and it appears there whole or not at all.
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

from runtime.backends import machine
from runtime.backends.recipes import Compilation, Section
from runtime.errors import RuntimeFault

_MEMORY_OF_A_COMPILER_MIB = 2048
Run = Callable[[list[str], Mapping[str, str]], str]
"""Runs a command with these variables besides its own; gives its output. Raises ImageBuildFailed."""


class CompilerMissing(RuntimeFault):
    """What a wheel is to be compiled with is not on this machine."""

    code = "compiler_missing"


def compiled(section: Section, python: Path, *, anew: bool = False, run: Run, step: Callable[[str], None]) -> list[str]:
    """Paths of wheels for the section's requirements, compiled against what `python` has installed; kept ones, or anew.

    Raises CompilerMissing, OSError where the cache cannot be written, and what `run` raises.
    """
    if section.compilation is None:
        raise ValueError("this section is not compiled")
    installed = run([str(python), "-m", "pip", "freeze", "--all"], {})
    kept = cache_folder() / _digest(section, installed)
    if anew:
        shutil.rmtree(kept, ignore_errors=True)
    if not kept.is_dir():
        _require_tools()
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".compiling-") as folder:
            made = _compile(section, section.compilation, python, Path(folder), run=run, step=step)
            if not kept.is_dir():  # someone else may have been quicker
                made.rename(kept)
    return sorted(map(str, kept.glob("*.whl")))


def cache_folder() -> Path:
    """Where compiled wheels are kept between builds, for this user: `$XDG_CACHE_HOME/trainyard/wheels`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard" / "wheels"


def _digest(section: Section, installed: str) -> str:
    interpreter = [sys.version, sysconfig.get_platform()]
    return hashlib.sha256(json.dumps([section, installed, interpreter]).encode()).hexdigest()


def _require_tools() -> None:
    missing = [tool for tool in ("g++", "make") if shutil.which(tool) is None]
    if missing:
        raise CompilerMissing(
            f"{' and '.join(missing)} must be installed to compile this image (Debian, Ubuntu: apt-get install "
            "g++ make; Fedora: dnf install gcc-c++ make). Then build it again."
        )


def _compile(
    section: Section, compilation: Compilation, python: Path, folder: Path, *, run: Run, step: Callable[[str], None]
) -> Path:
    tools, wheels = folder / "tools", folder / "wheels"
    if compilation.tools:
        step(f"Fetching what compiles: {', '.join(compilation.tools)}")
        # Beside the image, not in it: nobody needs a build tool at run time.
        run([str(python), "-m", "pip", "install", "--target", str(tools), *compilation.tools], {})
    jobs = max(1, min(int(machine.cpus()), machine.memory_mib() // _MEMORY_OF_A_COMPILER_MIB))
    step(f"Compiling {', '.join(section.requirements)}, {jobs} files at a time (minutes; once on this machine)")
    environment = {
        **dict(compilation.environment),
        "CXX": str(_compiler(compilation, folder)),
        "MAKEFLAGS": f"-j{jobs}",
        "PYTHONPATH": str(tools),
        "PATH": os.pathsep.join([str(tools / "bin"), str(python.parent), os.environ.get("PATH", os.defpath)]),
    }
    # pip keeps wheels too, but by name and interpreter alone: one that was built for another framework would be taken.
    command = [str(python), "-m", "pip", "wheel", "-v", "--no-cache-dir", "--no-deps", "--wheel-dir", str(wheels)]
    run([*command, *section.options, *section.requirements], environment)
    return wheels


def _compiler(compilation: Compilation, folder: Path) -> Path:
    """A shell script that is g++ but for the words that the recipe wants changed."""
    nothing = folder / "empty.cc"
    nothing.touch()
    flags = [*compilation.flags, *((f"*/{name}", str(nothing)) for name in compilation.empty)]
    wrapper = folder / "c++"
    wrapper.write_text(_wrapper(flags))
    wrapper.chmod(0o755)
    return wrapper


def _wrapper(flags: Sequence[tuple[str, str]]) -> str:
    changes = [f"    {old}) {f'word={shlex.quote(new)}' if new else 'continue'} ;;" for old, new in flags if old]
    added = " ".join(shlex.quote(new) for old, new in flags if not old)
    return "\n".join(
        [
            "#!/bin/sh",
            "# g++, but for the words that the recipe wants changed",
            "for word; do",
            "  shift",
            '  case "$word" in',
            *changes,
            "  esac",
            '  set -- "$@" "$word"',
            "done",
            f'exec g++ "$@" {added}'.rstrip(),
            "",
        ]
    )
