"""The report of `check_cluster` on this machine: with a real run, and with each fault that it finds."""

import pytest

from runtime.backends.local import check
from runtime.errors import BackendUnavailable
from tests.fakes import FakeBackend

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")


@pytest.fixture(autouse=True)
def _one_image(monkeypatch):
    """Only `bare` is an image that the check expects."""
    monkeypatch.setattr(check.recipes, "recipe_names", lambda: ["bare"])


def look(backend, root, images_root, *, smoke=True):
    """Return the lines of the report by their names."""
    lines = check.check(backend, root=root, images_root=images_root, smoke=smoke)
    return {line.name: line for line in lines}


def test_a_machine_that_can_serve_runs_passes_every_check(harness):
    lines = look(harness.backend, harness.folder / "runs", harness.images_root)
    assert [name for name, line in lines.items() if not line.ok] == []
    assert "Two nodes met and finished" in lines["smoke run"].detail
    assert harness.backend.names() == []


def test_each_failed_check_names_a_remedy(tmp_path, monkeypatch):
    def refuse():
        raise BackendUnavailable("There is no bubblewrap.")

    monkeypatch.setattr(check.sandbox, "find_bubblewrap", refuse)
    (tmp_path / "file").touch()
    fake = FakeBackend(root=tmp_path, cpus=0)
    fake.isolation_gaps = lambda: ["Runs share the network."]
    lines = look(fake, tmp_path / "file", tmp_path)
    for name in ("sandbox", "machine", "folder of runs", "images"):
        assert not lines[name].ok, name
        assert lines[name].remedy, name
    assert lines["isolation"].detail == "Runs share the network."
    monkeypatch.setattr(check, "MIN_FREE_BYTES", 2**60)
    lines = look(fake, tmp_path / "runs", tmp_path)
    assert lines["folder of runs"].remedy == f"Free disk space: at least {2**30} GiB are needed."
