from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from runtime.backends import zipapp
from runtime.launcher.carried import as_file


def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "launcher"
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.py").write_text("x = 1\n")
    first = zipapp.pack(folder)
    os.utime(folder / "a.py", (1e9, 1e9))
    (folder / "a.py").chmod(0o600)
    (folder / "a.pyc").write_bytes(b"not a source")
    assert zipapp.pack(folder) == first
    (folder / "a.py").write_text("x = 2\n")
    assert zipapp.pack(folder).digest != first.digest


def test_the_archive_fits_a_config_map_and_holds_sources_for_old_interpreters(tmp_path: Path) -> None:
    built = zipapp.build()
    assert len(built.data) < zipapp.LARGEST
    path = tmp_path / "launcher.pyz"
    path.write_bytes(built.data)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        assert names[0] == "__main__.py"
        assert {"launcher/pod.py", "launcher/agent.py", "launcher/rank.py", "launcher/smoke.py"} <= set(names)
        for name in names:
            ast.parse(archive.read(name), feature_version=(3, 8))


def test_an_archive_too_large_for_a_config_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_bytes(b"#" * zipapp.LARGEST)
    with pytest.raises(ValueError, match="too many for a ConfigMap"):
        zipapp.pack(tmp_path)


def test_files_are_taken_out_of_the_archive_with_what_they_want_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "launcher.pyz"
    path.write_bytes(zipapp.build().data)
    code = (
        f"import sys; sys.path.insert(0, {str(path)!r}); from launcher.carried import as_file\n"
        "print(as_file('rank.py', 'steps.py')); print(as_file('rank.py')); print(as_file('mpi_stub.py'))"
    )
    shown = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    first, again, stub = map(Path, shown.stdout.splitlines())
    assert first == again
    assert first.parent == stub.parent
    assert first.read_bytes() == Path(as_file("rank.py")).read_bytes()
    assert (first.parent / "steps.py").exists()
    assert first.parent.stat().st_mode & 0o777 == 0o700
    for each in first.parent.iterdir():
        each.unlink()
    first.parent.rmdir()


def test_beside_this_package_files_are_files_already() -> None:
    assert Path(as_file("rank.py", "steps.py")).parent.name == "launcher"
