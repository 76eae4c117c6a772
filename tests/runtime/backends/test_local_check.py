"""What `check_cluster` says of this machine, with a real run, and with what may be amiss."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.backends import local_check
from runtime.backends.base import Check
from runtime.errors import BackendUnavailable
from tests.fakes import FakeBackend
from tests.runtime.conftest import Yard


@pytest.fixture(autouse=True)
def _one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_check.recipes, "names", lambda: ["bare"])


def look(backend: object, root: Path, images_root: Path, *, smoke: bool = True) -> dict[str, Check]:
    lines = local_check.check(backend, root=root, images_root=images_root, smoke=smoke)  # type: ignore[arg-type]
    return {line.name: line for line in lines}


def test_a_machine_that_serves_runs(yard: Yard) -> None:
    found = look(yard.backend, yard.folder / "runs", yard.images_root)
    assert [name for name, line in found.items() if not line.ok] == []
    assert "Two nodes met and finished" in found["smoke run"].detail
    assert yard.backend.names() == []


def test_without_the_smoke_run_nothing_is_started(tmp_path: Path, bare_images: Path) -> None:
    fake = FakeBackend(root=tmp_path)
    found = look(fake, tmp_path, bare_images, smoke=False)
    assert fake.submissions == []
    assert "smoke run" not in found


def test_each_thing_amiss_comes_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise BackendUnavailable("There is no bubblewrap.")

    monkeypatch.setattr(local_check.sandbox, "find_bubblewrap", none)
    (tmp_path / "file").touch()
    fake = FakeBackend(root=tmp_path, cpus=0)
    fake.isolation_gaps = lambda: ["Runs share the network."]  # type: ignore[method-assign]
    found = look(fake, tmp_path / "file", tmp_path)
    for name in ("sandbox", "machine", "folder of runs", "images"):
        assert not found[name].ok, name
        assert found[name].remedy, name
    assert found["isolation"].detail == "Runs share the network."


def test_a_smoke_run_that_fails_says_how(tmp_path: Path, bare_images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_check, "SMOKE_SECONDS", 0.0)
    fake = FakeBackend(root=tmp_path)
    assert "did not end in 0 s" in look(fake, tmp_path, bare_images)["smoke run"].detail
    assert fake.names() == []
    full = FakeBackend(root=tmp_path, cpus=0.1)
    line = look(full, tmp_path, bare_images)["smoke run"]
    assert (line.ok, line.detail) == (False, "This can never fit.")
