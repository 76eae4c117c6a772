from __future__ import annotations

import ast
import os
import signal
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


def test_a_pod_that_is_told_to_end_while_it_loads_hears_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "launcher"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGTERM)  # comes while the modules are imported\n"
        "def start(): print(signal.SIGTERM in signal.sigpending())\n"
    )
    path = tmp_path / "launcher.pyz"
    path.write_bytes(zipapp.pack(folder).data)
    pod, node = (
        subprocess.run([sys.executable, path, *flag], check=False, capture_output=True) for flag in (["--pod"], [])
    )
    assert (pod.returncode, pod.stdout.strip()) == (0, b"True")
    assert node.returncode == -signal.SIGTERM


def take_out(path: Path, parent: Path, code: str) -> list[Path]:
    """The paths that an interpreter is given which has the package from the archive alone."""
    begin = (
        f"import sys; sys.path.insert(0, {str(path)!r}); import launcher.carried as carried\n"
        f"carried._PARENTS = ({str(parent)!r},); as_file = carried.as_file\n"
    )
    shown = subprocess.run([sys.executable, "-I", "-S", "-c", begin + code], capture_output=True, text=True, check=True)
    return [Path(line) for line in shown.stdout.splitlines()]


def test_files_are_taken_out_of_the_archive_with_what_they_want_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "launcher.pyz"
    path.write_bytes(zipapp.build().data)
    code = "print(as_file('rank.py', 'steps.py')); print(as_file('rank.py')); print(as_file('mpi_stub.py'))"
    first, again, stub = take_out(path, tmp_path, code)
    assert first == again == tmp_path / ".trainyard" / "rank.py"
    assert first.read_bytes() == Path(as_file("rank.py")).read_bytes()
    assert {each.name for each in stub.parent.iterdir()} == {"rank.py", "steps.py", "mpi_stub.py"}
    assert first.parent.stat().st_mode & 0o777 == 0o700
    first.write_text("of an older archive")
    (other,) = take_out(path, tmp_path, "print(as_file('rank.py'))")
    assert other == first
    assert first.read_bytes() == Path(as_file("rank.py")).read_bytes()


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "launcher.pyz"
    path.write_bytes(zipapp.build().data)
    (tmp_path / ".trainyard").mkdir()
    (tmp_path / ".trainyard").chmod(0o777)
    (found,) = take_out(path, tmp_path, "print(as_file('rank.py'))")
    assert found.parent.name.startswith(".trainyard-")
    assert list((tmp_path / ".trainyard").iterdir()) == []


def test_beside_this_package_files_are_files_already() -> None:
    assert Path(as_file("rank.py", "steps.py")).parent.name == "launcher"
