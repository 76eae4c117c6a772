import json
import runpy
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.launcher import smoke

RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "NODE_RANK": "0", "MASTER_PORT": "1", "BACKEND": "gloo"}


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The environment of a run's only rank; gives the folder that holds its folders."""
    for name in ("TF_CONFIG", "HOROVOD_CONTROLLER", "DATASETS", "DATASETS_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name in ("WORKSPACE", "CHECKPOINT_DIR", "RUN_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def findings(folder: Path) -> dict[str, dict[str, object]]:
    told = json.loads((folder / "RUN_DIR" / "check" / "rank-0.json").read_text())
    return {finding["name"]: finding for finding in told["findings"]}


def lone(total=None):
    """The collectives of a run of one rank."""
    sum_of = total or (lambda values: values[:2])
    return {"framework": "fake", "version": "1", "device": "cpu"}, lambda: (sum_of, lambda: None)


def test_all_is_well_and_nothing_stays(rank, monkeypatch, capsys):
    monkeypatch.setattr(smoke, "load_framework", lone)
    assert smoke.main() == 0
    found = findings(rank)
    assert [name for name, finding in found.items() if not finding["ok"]] == []
    assert list(found) == [
        "environment", "python", "names", "workspace", "checkpoint_dir", "run_dir", "framework", "meeting", "sum",
        "broadcast", "clock",
    ]  # fmt: skip
    assert found["sum"]["data"]["ranks"] == 1
    assert [*(rank / "WORKSPACE").iterdir(), *(rank / "CHECKPOINT_DIR").iterdir()] == []
    assert "everything works" in capsys.readouterr().out


def test_a_framework_that_can_not_be_imported_ends_the_collectives(rank, monkeypatch):
    # In the smoke test's own sight alone: other threads of this process import as well.
    nothing = SimpleNamespace(import_module=lambda name: runpy.run_module(f"no_such_{name}"))
    monkeypatch.setattr(smoke, "importlib", nothing)
    assert smoke.main() == 1
    found = findings(rank)
    assert found["framework"]["ok"] is False
    assert "no_such_torch" in str(found["framework"]["error"])
    assert "sum" not in found
    assert found["workspace"]["ok"]


@pytest.mark.parametrize(("total", "fault"), [(lambda _values: [7.0, 0.0], "add up to 7.0, not to 1.0")])
def test_a_wrong_sum_is_found(rank, monkeypatch, total, fault):
    monkeypatch.setattr(smoke, "load_framework", lambda: lone(total))
    assert smoke.main() == 1
    assert fault in str(findings(rank)["sum"]["error"])
    assert "42" in str(findings(rank)["broadcast"]["error"])


def test_what_was_found_before_a_crash_is_there(rank, monkeypatch):
    def crash():
        raise SystemExit(3)

    monkeypatch.setattr(smoke, "load_framework", crash)
    with pytest.raises(SystemExit):
        smoke.main()
    assert findings(rank)["run_dir"]["ok"]


def test_a_missing_variable_is_named(rank, monkeypatch):
    monkeypatch.setattr(smoke, "load_framework", lone)
    monkeypatch.delenv("BACKEND")
    assert smoke.main() == 1
    assert findings(rank)["environment"]["error"] == "missing: BACKEND"


def test_a_folder_that_can_not_be_written_is_told(rank):
    with pytest.raises(OSError, match="No such file"):
        smoke.check_folder(str(rank / "nothing"))


def test_names_have_addresses(rank, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert smoke.check_names() == {"own": "127.0.0.1", "first": "127.0.0.1"}


def test_a_dataset_is_counted_and_must_be_read_only(rank, monkeypatch):
    folder = rank / "digits" / "deep"
    folder.mkdir(parents=True)
    (folder / "a.csv").write_text("12345")
    (rank / "digits" / "b.csv").write_text("1")
    with pytest.raises(smoke.Wrong, match="can be written"):
        smoke.check_dataset(str(rank / "digits"))
    assert not (rank / "digits" / ".trainyard-check").exists()
    real = open

    def guarded(path, mode="r", **more):
        if "w" in mode:
            raise OSError(30, "Read-only file system")
        return real(path, mode, **more)

    monkeypatch.setattr("builtins.open", guarded)
    assert smoke.check_dataset(str(rank / "digits")) == {"name": "digits", "files": 2, "bytes": 6}


def test_an_empty_or_absent_dataset_is_at_fault(rank):
    for folder in (rank / "absent", rank / "WORKSPACE"):
        with pytest.raises(smoke.Wrong, match="no file"):
            smoke.check_dataset(str(folder))


def test_each_framework_is_known_by_its_own_variables(monkeypatch):
    for name in ("_pytorch", "_horovod", "_tensorflow"):
        monkeypatch.setattr(smoke, name, lambda name=name: name)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("HOROVOD_CONTROLLER", raising=False)
    assert smoke.load_framework() == "_pytorch"
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    assert smoke.load_framework() == "_horovod"
    monkeypatch.setenv("TF_CONFIG", "{}")
    assert smoke.load_framework() == "_tensorflow"
