"""The folders of runs on shared storage, which customers' code may change at any moment."""

import os

import pytest

from runtime.backends.kubernetes import backend
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.runs import Runs
from runtime.backends.kubernetes.volume import RunFolders
from runtime.backends.log_chunks import RawChunk
from runtime.errors import BackendUnavailable
from runtime.launcher.log_times import PAIR
from runtime.launcher.record import STACKS_LIMIT_BYTES


@pytest.fixture
def folders(tmp_path):
    """The folders of the run `job-1-1`. Tests pass the numbers of its nodes (2) and ranks (4) to `fingerprint`."""
    folders = RunFolders(tmp_path, os.geteuid())
    folders.create("job-1-1", "job-1")
    return folders


def read(folders, file, offset, limit, folder="logs"):
    """Return the bytes of a file of the run from the offset, and whether they reach its end."""
    chunk = folders.read("job-1-1", folder, file, offset, limit)
    return chunk.data, chunk.at_end


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")
def test_folders_belong_to_the_pods_user(tmp_path):
    RunFolders(tmp_path, 10001).create("job-1-1", "job-1")
    for path in (tmp_path / "job-1-1", tmp_path / "job-1-1" / "run", tmp_path / ".outputs" / "job-1"):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (10001, 0o700)


@pytest.mark.parametrize("is_root", [True, False])
def test_pods_may_change_checkpoints_that_the_console_copied(tmp_path, monkeypatch, is_root):
    owners = {}

    def chown(path, uid, _gid, *, follow_symlinks=True, **_folder):
        assert not follow_symlinks
        owners[os.fspath(path)] = uid

    monkeypatch.setattr(os, "geteuid", lambda: 0 if is_root else 1234)
    monkeypatch.setattr(os, "chown", chown)

    def copy(folder):
        (folder / "deep").mkdir(mode=0o755)
        (folder / "deep" / "weights").touch(mode=0o644)
        (folder / "latest").symlink_to("/etc/passwd")

    RunFolders(tmp_path, 10001).fill_checkpoints("job-1", copy)
    folder = tmp_path / ".checkpoints" / "job-1"
    if is_root:
        # All but the first are named relative to a descriptor of their folder.
        assert owners == {str(folder): 10001, "deep": 10001, "weights": 10001, "latest": 10001}
    else:
        modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "deep", folder / "deep" / "weights")]
        assert modes == [0o777, 0o777, 0o666]


def test_files_are_read_from_an_offset(folders):
    (folders.root / "job-1-1" / "logs" / "rank-0.log").write_text("0123456789")
    assert read(folders, "rank-0.log", 4, 3) == (b"456", False)
    assert read(folders, "rank-0.log", 7, 9) == (b"789", True)
    assert read(folders, "rank-0.log", 70, 9) == (b"", True)
    assert read(folders, "rank-1.log", 0, 9) == (b"", True)


def test_stacks_are_read_of_the_runs_ranks_only_and_up_to_a_limit(folders, monkeypatch):
    job = {"metadata": {"name": "job-1-1", "namespace": "runs", "uid": "u"}, "spec": {"completions": 3}}
    monkeypatch.setattr(Runs, "get_job", lambda *_arguments: job)
    monkeypatch.setattr(backend, "_MAX_STACKS_BYTES", 3 * STACKS_LIMIT_BYTES // 2)
    config = ClusterConfig.from_data("east", {"volume": {"claim": "c", "root": str(folders.root)}})
    for rank in (0, 2, 3, 10**6):
        with (folders.root / "job-1-1" / "logs" / f"stacks-{rank}.txt").open("wb") as file:
            file.truncate(1 << 40)  # sparse, so it uses no disk
    stacks = backend.KubernetesBackend(config=config, root=folders.root).stacks("job-1-1")
    sizes = {rank: len(text) for rank, text in stacks.items()}
    assert sizes == {0: STACKS_LIMIT_BYTES, 2: STACKS_LIMIT_BYTES // 2}


def test_times_are_read_from_a_regular_file_only(folders, tmp_path):
    raw_chunk = RawChunk(b"0123456789", at_end=True, offset=0)
    times = folders.root / "job-1-1" / "logs" / "rank-0.times"
    times.write_bytes(PAIR.pack(0, 5000))  # offset and milliseconds
    before = folders.fingerprint("job-1-1", 2, 4)
    assert folders.log_times("job-1-1", 0, raw_chunk) == [(0, 5.0)]
    times.rename(tmp_path / "elsewhere")
    for replace in (lambda: times.symlink_to(tmp_path / "elsewhere"), lambda: os.mkfifo(times)):
        assert folders.log_times("job-1-1", 0, raw_chunk) == [], "there is no file"
        replace()
        assert folders.log_times("job-1-1", 0, raw_chunk) == []
        times.unlink()
    assert folders.fingerprint("job-1-1", 2, 4) == before, "only the log itself counts"


def test_writing_is_atomic_and_follows_no_link(folders, tmp_path):
    nodes, secret = folders.root / "job-1-1" / "nodes", tmp_path / "secret"
    folders.write("job-1-1", "nodes", "stop.json", b"one")
    folders.write("job-1-1", "nodes", "stop.json", b"two")
    assert {path.name: path.read_bytes() for path in nodes.iterdir()} == {"stop.json": b"two"}
    assert (nodes / "stop.json").stat().st_mode & 0o777 == 0o644, "pods run as another user"
    secret.write_bytes(b"the console's own")
    (nodes / "stop.json").unlink()
    (nodes / "stop.json").symlink_to(secret)
    folders.write("job-1-1", "nodes", "stop.json", b"three")
    assert secret.read_bytes() == b"the console's own"
    assert (nodes / "stop.json").read_bytes() == b"three"
    (nodes / "stop.json").unlink()
    (nodes / "stop.json").mkdir()
    folders.write("job-1-1", "nodes", "stop.json", b"four")
    assert [path.name for path in nodes.iterdir()] == ["stop.json"], "no temporary file is left"
    nodes.rename(nodes.with_name("moved"))
    nodes.symlink_to(tmp_path)
    # A link in place of the folder, and a run without a folder: nothing is written.
    folders.write("job-1-1", "nodes", "stop.json", b"five")
    folders.write("job-2-1", "nodes", "stop.json", b"six")
    assert not (tmp_path / "stop.json").exists()


def test_reading_follows_no_link_and_opens_regular_files_only(folders, tmp_path):
    logs = folders.root / "job-1-1" / "logs"
    os.mkfifo(logs / "rank-1.log")  # opening it would block
    assert read(folders, "rank-1.log", 0, 9) == (b"", True)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "rank-0.log").write_text("the console's own")
    run = folders.root / "job-1-1"
    (run / "logs" / "rank-0.log").symlink_to(secret / "rank-0.log")
    assert read(folders, "rank-0.log", 0, 99) == (b"", True)
    (run / "logs").rename(run / "moved")
    (run / "logs").symlink_to(secret)
    assert read(folders, "rank-0.log", 0, 99) == (b"", True)
    (run / "moved" / "rank-2.log").write_text("its own")
    assert read(folders, "rank-2.log", 0, 99, folder="moved") == (b"its own", True)
    run.rename(folders.root / "elsewhere")
    run.symlink_to(folders.root / "elsewhere")
    assert read(folders, "rank-2.log", 0, 99, folder="moved") == (b"", True)


def test_a_change_of_content_changes_the_fingerprint(folders):
    run = folders.root / "job-1-1"
    fingerprints = [folders.fingerprint("job-1-1", 2, 4)]
    for path, text in (
        ("logs/rank-0.log", "a"),
        ("logs/rank-0.log", "ab"),
        ("run/metrics.jsonl", "{}"),
        ("nodes/0.json", "x"),
        ("nodes/1.samples.jsonl", "x"),
    ):
        (run / path).write_text(text)
        fingerprints.append(folders.fingerprint("job-1-1", 2, 4))
    for path in ("logs/rank-1.log", "logs/rank-3.log"):
        (run / path).symlink_to("/etc/passwd")  # it cannot be opened, but it counts
        fingerprints.append(folders.fingerprint("job-1-1", 2, 4))
    assert len(set(fingerprints)) == len(fingerprints)
    os.utime(run / "nodes" / "0.json", (1, 1))
    assert folders.fingerprint("job-1-1", 2, 4) == fingerprints[-1], "a new time alone is no change"
    assert folders.fingerprint("no-such", 2, 4) == ()


def test_a_fingerprint_looks_at_the_platforms_files_only(folders, monkeypatch):
    monkeypatch.delattr(os, "listdir")  # customer code may have created any number of files
    monkeypatch.delattr(os, "scandir")
    before = folders.fingerprint("job-1-1", 2, 4)
    for path in ("logs/rank-4.log", "logs/other", "nodes/2.json", "nodes/other"):
        (folders.root / "job-1-1" / path).write_text("x")
    assert folders.fingerprint("job-1-1", 2, 4) == before


def test_an_nfs_cache_does_not_hide_changes(folders, monkeypatch):
    log = folders.root / "job-1-1" / "logs" / "rank-0.log"
    log.write_text("a")
    old = log.stat()
    monkeypatch.setattr(os, "stat", lambda *_arguments, **_options: old)  # as an NFS client does for seconds
    fingerprint = folders.fingerprint("job-1-1", 2, 4)
    with log.open("a") as file:
        file.write("b")
    assert folders.fingerprint("job-1-1", 2, 4) != fingerprint


def test_removing_a_run_leaves_the_jobs_checkpoints_and_outputs_which_have_their_own_removal(folders):
    locked = folders.root / "job-1-1" / "run" / "locked"
    locked.mkdir()
    (locked / "file").write_text("x")
    locked.chmod(0)
    for _ in range(2):  # the second has nothing to do
        folders.remove("job-1-1")
    assert sorted(path.name for path in folders.root.iterdir()) == [".checkpoints", ".outputs", ".trash"]
    assert list((folders.root / ".trash").iterdir()) == []
    for no_key in ("../job-1", "."):  # paths, so nothing is removed
        folders.remove_shared(no_key)
    shared = [folders.root / parent / "job-1" for parent in (".checkpoints", ".outputs")]
    assert all(folder.is_dir() for folder in shared)
    folders.remove_shared("job-1")
    assert not any(folder.exists() for folder in shared)


def test_an_unusable_volume_raises(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BackendUnavailable, match="could not be created"):
        RunFolders(tmp_path / "file", 10001).create("job-1-1", "")
