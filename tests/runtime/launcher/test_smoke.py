"""The check of an image: what each rank tests, and what it reports (`runtime.launcher.smoke`)."""

import errno
import json
import os

import pytest

from runtime.launcher import smoke

RANK_ENVIRONMENT = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "NODE_RANK": "0", "MASTER_PORT": "1", "BACKEND": "gloo",
}  # fmt: skip
"""The variables of a run's only rank, besides its folders and MASTER_ADDR."""


@pytest.fixture
def run_folders(monkeypatch, tmp_path):
    """Set the environment of a run's only rank; return the parent of its folders."""
    for name in ("TF_CONFIG", "HOROVOD_CONTROLLER", "DATASETS", "DATASETS_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in RANK_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name in ("WORKSPACE", "CHECKPOINT_DIR", "OUTPUT_DIR", "RUN_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def findings(folder):
    reported = json.loads((folder / "RUN_DIR" / "check" / "rank-0.json").read_text())
    return {finding["name"]: finding for finding in reported["findings"]}


def single_rank_framework(all_reduce=None):
    """Return a framework for a run of one rank, where a sum over all ranks is the rank's own value."""
    collectives = smoke.Collectives(tuple, all_reduce or (lambda values: values[0]), barrier=lambda: None)
    return smoke.Framework({"framework": "fake", "version": "1", "device": "cpu"}, lambda: collectives)


def test_a_successful_check_leaves_no_files(run_folders, monkeypatch, capsys):
    monkeypatch.setattr(smoke, "load_framework", single_rank_framework)
    assert smoke.main() == 0
    result = findings(run_folders)
    assert [name for name, finding in result.items() if not finding["ok"]] == []
    assert list(result) == [
        "environment", "python", "names", "workspace", "checkpoint_dir", "output_dir", "run_dir", "framework",
        "meeting", "sum", "broadcast", "clock",
    ]  # fmt: skip
    assert result["sum"]["data"]["ranks"] == 1
    for name in ("WORKSPACE", "CHECKPOINT_DIR", "OUTPUT_DIR"):
        assert list((run_folders / name).iterdir()) == []
    assert "everything works" in capsys.readouterr().out


def test_a_wrong_sum_fails_the_check(run_folders, monkeypatch):
    monkeypatch.setattr(smoke, "load_framework", lambda: single_rank_framework(lambda _values: 7.0))
    assert smoke.main() == 1
    result = findings(run_folders)
    assert result["sum"]["error"] == "the ranks' numbers add up to 7.0, not to 1.0"
    assert result["broadcast"]["error"] == "rank 0 sent 42, and 7.0 arrived"


def test_a_dataset_is_counted_and_must_be_read_only(run_folders, monkeypatch):
    folder = run_folders / "digits" / "deep"
    folder.mkdir(parents=True)
    (folder / "a.csv").write_text("12345")
    (run_folders / "digits" / "b.csv").write_text("1")
    for empty in (run_folders / "absent", run_folders / "WORKSPACE"):
        with pytest.raises(smoke.CheckFailed, match="no file"):
            smoke.check_dataset(str(empty))
    real_unlink = os.unlink

    def unlink_after_another_rank(path):
        monkeypatch.setattr(os, "unlink", real_unlink)
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(smoke.CheckFailed, match="can be written"):
            smoke.check_dataset(str(run_folders / "digits"))
        real_unlink(path)

    monkeypatch.setattr(os, "unlink", unlink_after_another_rank)
    with pytest.raises(smoke.CheckFailed, match="can be written"):
        smoke.check_dataset(str(run_folders / "digits"))
    assert not list((run_folders / "digits").glob(".*"))
    real_open = open

    def open_read_only(path, mode="r", **options):
        if "w" in mode:
            raise OSError(errno.EROFS, "Read-only file system")
        return real_open(path, mode, **options)

    # Instead of a folder without write permission, because root can write to that.
    monkeypatch.setattr("builtins.open", open_read_only)
    assert smoke.check_dataset(str(run_folders / "digits")) == {"name": "digits", "files": 2, "bytes": 6}
