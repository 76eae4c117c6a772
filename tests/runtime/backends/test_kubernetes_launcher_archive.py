"""The launcher as one file: how it is packed, and what a pod extracts from it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.backends.kubernetes import launcher_archive
from runtime.launcher.extract import extract_file


def test_the_same_sources_give_the_same_bytes(tmp_path):
    folder = tmp_path / "launcher"
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.py").write_text("x = 1\n")
    first = launcher_archive.pack(folder)
    os.utime(folder / "a.py", (1e9, 1e9))
    (folder / "a.py").chmod(0o600)
    (folder / "a.pyc").write_bytes(b"not a source")
    assert launcher_archive.pack(folder) == first
    (folder / "a.py").write_text("x = 2\n")
    assert launcher_archive.pack(folder) != first
    (folder / "c.py").write_bytes(bytes(launcher_archive.MAX_BYTES))
    with pytest.raises(ValueError, match="a ConfigMap holds fewer"):
        launcher_archive.pack(folder)


def test_a_signal_during_startup_is_kept_for_the_launcher(tmp_path):
    folder = tmp_path / "launcher"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(
        "import os, signal\n"
        "os.kill(os.getpid(), signal.SIGTERM)  # comes while the modules are imported\n"
        "def start(): print(signal.SIGTERM in signal.sigpending())\n"
    )
    path = tmp_path / "launcher.pyz"
    path.write_bytes(launcher_archive.pack(folder))
    # With --pod, the archive blocks SIGTERM before it imports anything.
    with_pod, without_pod = (
        subprocess.run([sys.executable, path, *flag], check=False, capture_output=True) for flag in (["--pod"], [])
    )
    assert (with_pod.returncode, with_pod.stdout.strip()) == (0, b"True")
    assert without_pod.returncode == -signal.SIGTERM


def extract_paths(path, parent, code):
    """Run `code` in an interpreter that imports the package from the archive, and return the paths that it prints."""
    begin = (
        f"import sys; sys.path.insert(0, {str(path)!r}); import launcher.extract as extract\n"
        f"extract._PARENT_FOLDERS = ({str(parent)!r},); extract_file = extract.extract_file\n"
    )
    shown = subprocess.run([sys.executable, "-I", "-S", "-c", begin + code], capture_output=True, text=True, check=True)
    return [Path(line) for line in shown.stdout.splitlines()]


def test_files_are_extracted_with_their_companions_to_a_folder_that_only_their_user_can_write(tmp_path):
    path = tmp_path / "launcher.pyz"
    path.write_bytes(launcher_archive.build())
    calls = ("'rank.py', 'step_timer.py'", "'rank.py'", "'mpi_stub.py'")  # a file, and others that it needs
    code = "; ".join(f"print(extract_file({arguments}))" for arguments in calls)
    first, second, stub = extract_paths(path, tmp_path, code)
    assert first == second == tmp_path / ".trainyard" / "rank.py"
    source = Path(extract_file("rank.py")).read_bytes()
    assert first.read_bytes() == source
    assert {each.name for each in stub.parent.iterdir()} == {"rank.py", "step_timer.py", "mpi_stub.py"}
    assert first.parent.stat().st_mode & 0o777 == 0o700
    first.write_text("from an older archive")
    assert extract_paths(path, tmp_path, "print(extract_file('rank.py'))") == [first]
    assert first.read_bytes() == source
    first.parent.chmod(0o777)
    first.write_text("of somebody else")
    (other,) = extract_paths(path, tmp_path, "print(extract_file('rank.py'))")
    assert other.parent.name.startswith(".trainyard-")
    assert other.read_bytes() == source
    assert first.read_text() == "of somebody else", "the folder is not used"
