"""Wheels that are compiled for an image, as Horovod's is.

The compiler and pip are real. They compile a small library in C++, offline.
"""

import ctypes
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from runtime.images import wheels
from runtime.images.recipes import Compilation, Section
from runtime.images.wheels import CompilerMissing

# A small build backend. `CXX` is the compiler's wrapper. It must replace `-DANSWER=1`, leave out `--nonsense`, which no
# compiler knows, and compile an empty file in place of `broken.cc`.
BACKEND = """
    import os, subprocess, zipfile

    def build_wheel(folder, config_settings=None, metadata_directory=None):
        command = [os.environ["CXX"], "-DANSWER=1", "--nonsense", "-shared", "-fPIC", "-o", "answer.so"]
        subprocess.run([*command, "answer.cc", "./broken.cc"], check=True)
        name = f"answer-{os.environ['VERSION']}-py3-none-any.whl"
        with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
            wheel.write("answer.so")
            wheel.write(os.environ["CMAKE_TOOLCHAIN_FILE"], "toolchain.cmake")
            info, version = f"answer-{os.environ['VERSION']}.dist-info", os.environ["VERSION"]
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: answer\\nVersion: {version}\\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
            wheel.writestr(f"{info}/RECORD", "")
        return name
"""
SOURCE = 'extern "C" int answer() { return ANSWER * 10 + ADDED; }\n'


class Shell:
    """Runs commands as the builder does, and remembers them."""

    def __init__(self):
        self.commands = []

    def __call__(self, command, environment):
        self.commands.append(command)
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def compilations(self):
        """How many of the commands were `pip wheel`."""
        return sum("wheel" in command for command in self.commands)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of compiled wheels, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trainyard" / "wheels"


@pytest.fixture
def section(tmp_path):
    """A recipe's section that compiles the library."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (source / "backend.py").write_text(textwrap.dedent(BACKEND))
    (source / "answer.cc").write_text(SOURCE)
    (source / "broken.cc").write_text("#include <no_such_header.h>\n")
    flags = (("-DANSWER=1", "-DANSWER=42"), ("--nonsense", ""), ("", "-DADDED=7"))
    compilation = Compilation(
        environment=(("VERSION", "1"),),
        flags=flags,
        emptied_files=("broken.cc",),
        cmake_commands=("set(FIRST ON)", "set(SECOND ON)"),
    )
    return Section(("--no-build-isolation",), (str(source),), compilation)


def compile_it(section, shell, *, rebuild=False):
    return wheels.build_wheels(
        section, Path(sys.executable), rebuild=rebuild, run=shell, report_step=lambda _text: None
    )


def test_a_wheel_is_compiled_by_the_wrapper_once_for_each_recipe(section, cache, tmp_path):
    shell = Shell()
    (wheel,) = compile_it(section, shell)
    assert compile_it(section, shell) == [wheel]
    assert shell.compilations == 1
    assert [path.name for path in cache.iterdir()] == [Path(wheel).parent.name], "nothing else is left there"
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("answer.so", tmp_path)
        assert archive.read("toolchain.cmake") == b"set(FIRST ON)\nset(SECOND ON)"
    assert ctypes.CDLL(library).answer() == 427, "ANSWER is 42, and ADDED is 7"
    other = section._replace(compilation=section.compilation._replace(environment=(("VERSION", "2"),)))
    compile_it(other, shell)
    assert shell.compilations == len(list(cache.iterdir())) == 2
    # pip's own cache knows nothing of what a wheel was compiled for.
    assert all("--no-cache-dir" in command for command in shell.commands if "wheel" in command)
    assert compile_it(section, shell, rebuild=True) == [wheel]
    assert shell.compilations == 3


def test_a_compilation_that_fails_leaves_nothing_in_the_cache(section, cache):
    broken = section._replace(compilation=section.compilation._replace(emptied_files=()))
    with pytest.raises(AssertionError, match=r"no_such_header\.h"):
        compile_it(broken, Shell())
    assert list(cache.iterdir()) == []


def test_without_a_compiler_the_error_says_what_to_install(section, cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerMissing, match=r"g\+\+ and make must be installed .* apt-get install g\+\+ make"):
        compile_it(section, Shell())
    assert not cache.exists()
