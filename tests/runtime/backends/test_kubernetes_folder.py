import os
from pathlib import Path

import pytest

from runtime.backends.kubernetes_folder import Folders
from runtime.errors import BackendUnavailable


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path, os.geteuid())
    made.make("job-1-1", "job-1")
    return made


def test_a_runs_folders_are_there_for_its_pods_and_making_them_again_is_fine(folders: Folders) -> None:
    folders.make("job-1-1", "job-1")
    made = {str(path.relative_to(folders.root)) for path in folders.root.rglob("*")}
    assert {"job-1-1/run/tensorboard", "job-1-1/logs", "job-1-1/nodes", ".checkpoints/job-1"} <= made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_pods_own_their_folders_and_nobody_else_may_look(tmp_path: Path) -> None:
    Folders(tmp_path, 10001).make("job-1-1", "job-1")
    for path in (tmp_path / "job-1-1", tmp_path / "job-1-1" / "run", tmp_path / ".checkpoints" / "job-1"):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (10001, 0o700)


def test_files_are_read_from_an_offset(folders: Folders) -> None:
    (folders.root / "job-1-1" / "logs" / "rank-0.log").write_text("0123456789")
    assert folders.read("job-1-1", "logs", "rank-0.log", 4, 3) == (b"456", False)
    assert folders.read("job-1-1", "logs", "rank-0.log", 7, 9) == (b"789", True)
    assert folders.read("job-1-1", "logs", "rank-0.log", 70, 9) == (b"", True)
    assert folders.read("job-1-1", "logs", "rank-1.log", 0, 9) == (b"", True)
    assert folders.files("job-1-1", "logs") == ["rank-0.log"]
    assert folders.files("job-2-1", "logs") == []


def test_what_is_put_there_is_whole_and_follows_no_link(folders: Folders, tmp_path: Path) -> None:
    nodes, secret = folders.root / "job-1-1" / "nodes", tmp_path / "secret"
    folders.write("job-1-1", "nodes", "stop.json", b"one")
    folders.write("job-1-1", "nodes", "stop.json", b"two")
    assert {path.name: path.read_bytes() for path in nodes.iterdir()} == {"stop.json": b"two"}
    assert (nodes / "stop.json").stat().st_mode & 0o777 == 0o644, "pods have another user"
    secret.write_bytes(b"the console's own")
    (nodes / "stop.json").unlink()
    (nodes / "stop.json").symlink_to(secret)
    folders.write("job-1-1", "nodes", "stop.json", b"three")
    assert secret.read_bytes() == b"the console's own"
    assert (nodes / "stop.json").read_bytes() == b"three"
    (nodes / "stop.json").unlink()
    (nodes / "stop.json").mkdir()
    folders.write("job-1-1", "nodes", "stop.json", b"four")
    assert [path.name for path in nodes.iterdir()] == ["stop.json"], "nothing is left of what could not be put there"
    nodes.rename(nodes.with_name("moved"))
    nodes.symlink_to(tmp_path)
    folders.write("job-1-1", "nodes", "stop.json", b"five")
    folders.write("job-2-1", "nodes", "stop.json", b"six")
    assert not (tmp_path / "stop.json").exists()


def test_no_link_is_followed_wherever_it_stands(folders: Folders, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "rank-0.log").write_text("the console's own")
    run = folders.root / "job-1-1"
    (run / "logs" / "rank-0.log").symlink_to(secret / "rank-0.log")
    assert folders.read("job-1-1", "logs", "rank-0.log", 0, 99) == (b"", True)
    (run / "logs").rename(run / "moved")
    (run / "logs").symlink_to(secret)
    assert folders.read("job-1-1", "logs", "rank-0.log", 0, 99) == (b"", True)
    assert folders.files("job-1-1", "logs") == []
    run.rename(folders.root / "elsewhere")
    run.symlink_to(folders.root / "elsewhere")
    assert folders.read("job-1-1", "moved", "rank-0.log", 0, 99) == (b"", True)


def test_nothing_but_a_file_is_read(folders: Folders) -> None:
    logs = folders.root / "job-1-1" / "logs"
    os.mkfifo(logs / "rank-0.log")  # would block whoever opens it
    (logs / "rank-1.log").mkdir()
    assert folders.read("job-1-1", "logs", "rank-0.log", 0, 9) == (b"", True)
    assert folders.read("job-1-1", "logs", "rank-1.log", 0, 9) == (b"", True)


def test_what_a_run_writes_changes_its_stamp(folders: Folders) -> None:
    seen = [folders.stamp("job-1-1")]
    for path, text in (
        ("logs/rank-0.log", "a"),
        ("logs/rank-0.log", "ab"),
        ("run/metrics.jsonl", "{}"),
        ("nodes/0.json", "x"),
    ):
        (folders.root / "job-1-1" / path).write_text(text)
        seen.append(folders.stamp("job-1-1"))
    assert len(set(seen)) == len(seen)
    assert folders.stamp("job-1-1") == seen[-1]
    assert folders.stamp("no-such") == ()


def test_a_networks_cache_does_not_hide_what_other_machines_write(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = folders.root / "job-1-1" / "logs" / "rank-0.log"
    log.write_text("a")
    old = log.stat()
    monkeypatch.setattr(os, "stat", lambda *_arguments, **_options: old)  # as an NFS client does for seconds
    seen = folders.stamp("job-1-1")
    with log.open("a") as file:
        file.write("b")
    assert folders.stamp("job-1-1") != seen


def test_what_cannot_be_opened_is_still_seen(folders: Folders) -> None:
    logs = folders.root / "job-1-1" / "logs"
    (logs / "0").symlink_to("/etc/passwd")
    os.mkfifo(logs / "1")
    seen = folders.stamp("job-1-1")
    assert len(seen) == 2 * 3
    (logs / "0").unlink()
    assert folders.stamp("job-1-1") != seen


def test_a_record_that_is_only_touched_is_no_news(folders: Folders) -> None:
    record = folders.root / "job-1-1" / "nodes" / "0.json"
    record.write_text("x")
    seen = folders.stamp("job-1-1")
    os.utime(record, (1, 1))
    assert folders.stamp("job-1-1") == seen


def test_a_runs_folder_goes_whole_and_what_attempts_share_by_its_key(folders: Folders) -> None:
    locked = folders.root / "job-1-1" / "run" / "locked"
    locked.mkdir()
    (locked / "file").write_text("x")
    locked.chmod(0)
    folders.remove("job-1-1")
    folders.remove("job-1-1")
    assert sorted(path.name for path in folders.root.iterdir()) == [".checkpoints", ".trash"]
    assert list((folders.root / ".trash").iterdir()) == []
    folders.remove_checkpoints("../job-1")
    folders.remove_checkpoints(".")
    assert (folders.root / ".checkpoints" / "job-1").is_dir()
    folders.remove_checkpoints("job-1")
    assert not (folders.root / ".checkpoints" / "job-1").exists()


def test_a_volume_that_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BackendUnavailable, match="could not be made"):
        Folders(tmp_path / "file", 10001).make("job-1-1", "")
