import json

import pytest

from runtime.launcher import smoke

RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "NODE_RANK": "0", "MASTER_PORT": "1", "BACKEND": "gloo"}


@pytest.fixture
def rank(monkeypatch, tmp_path):
    """Set the environment of a run's only rank; return the parent of its folders."""
    for name in ("TF_CONFIG", "HOROVOD_CONTROLLER", "DATASETS", "DATASETS_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in RANK.items():
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


def lone(total=None):
    """The collectives of a run of one rank."""
    collectives = smoke.Collectives(total or (lambda values: values[0]), lambda: None)
    return smoke.Framework({"framework": "fake", "version": "1", "device": "cpu"}, lambda: collectives)


def test_a_successful_check_leaves_no_files(rank, monkeypatch, capsys):
    monkeypatch.setattr(smoke, "load_framework", lone)
    assert smoke.main() == 0
    result = findings(rank)
    assert [name for name, finding in result.items() if not finding["ok"]] == []
    assert list(result) == [
        "environment", "python", "names", "workspace", "checkpoint_dir", "output_dir", "run_dir", "framework",
        "meeting", "sum", "broadcast", "clock",
    ]  # fmt: skip
    assert result["sum"]["data"]["ranks"] == 1
    assert [*(rank / "WORKSPACE").iterdir(), *(rank / "CHECKPOINT_DIR").iterdir()] == []
    assert "everything works" in capsys.readouterr().out


def test_a_wrong_sum_fails_the_check(rank, monkeypatch):
    monkeypatch.setattr(smoke, "load_framework", lambda: lone(lambda _values: 7.0))
    assert smoke.main() == 1
    assert "add up to 7.0, not to 1.0" in str(findings(rank)["sum"]["error"])
    assert "42" in str(findings(rank)["broadcast"]["error"])


def test_a_dataset_is_counted_and_must_be_read_only(rank, monkeypatch):
    folder = rank / "digits" / "deep"
    folder.mkdir(parents=True)
    (folder / "a.csv").write_text("12345")
    (rank / "digits" / "b.csv").write_text("1")
    for empty in (rank / "absent", rank / "WORKSPACE"):
        with pytest.raises(smoke.CheckFailed, match="no file"):
            smoke.check_dataset(str(empty))
    with pytest.raises(smoke.CheckFailed, match="can be written"):
        smoke.check_dataset(str(rank / "digits"))
    assert not (rank / "digits" / ".trainyard-check").exists()
    real = open

    def guarded(path, mode="r", **more):
        if "w" in mode:
            raise OSError(30, "Read-only file system")
        return real(path, mode, **more)

    monkeypatch.setattr("builtins.open", guarded)
    assert smoke.check_dataset(str(rank / "digits")) == {"name": "digits", "files": 2, "bytes": 6}
