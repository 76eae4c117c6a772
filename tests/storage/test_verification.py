"""`manage.py verify_storage`: damaged, lost and unknown files, and what `--repair` repairs."""

import io
from datetime import timedelta

import pytest
from django.core.management import call_command

from storage import catalog, garbage_collection, manifests, recycle_bin, selectors
from storage.models import DeletedFile
from storage.verification import Level, verify
from tests.factories.storage import DatasetVersionFactory
from tests.storage.archives import tar_of
from tests.storage.test_models import publish as publish_model

pytestmark = pytest.mark.django_db


def findings(**options):
    return {finding.subject: (finding.level, finding.text) for finding in verify(**options)}


@pytest.fixture
def version(owner):
    dataset = catalog.create_dataset(organization=owner.organization, user=None, name="digits")
    # `sub.txt` sorts before `sub/b`, but after the folder `sub`.
    files = {"a": b"1", "sub/b": b"2", "sub.txt": b"3", "sub/deep/c": b"4"}
    return catalog.publish_version(dataset=dataset, user=None, stream=io.BytesIO(tar_of(files)))


@pytest.fixture
def workspace(owner):
    workspace = catalog.create_workspace(organization=owner.organization, user=None, name="code")
    catalog.write_file(workspace=workspace, path="train.py", stream=io.BytesIO(b"print(1)"))
    return workspace


@pytest.mark.usefixtures("version")
def test_sound_storage_has_no_findings_and_exit_code_0(workspace, capsys):
    recycle_bin.delete(workspace=workspace, path="train.py")
    call_command("verify_storage")
    assert capsys.readouterr().out == "problem: 0, repaired: 0, note: 0\n"


def test_damaged_and_lost_files_are_problems_that_no_repair_hides(version, owner, capsys):
    folder = selectors.version_folder(version)
    for path in (folder, folder / "a", folder / "sub", folder / "sub/deep"):
        path.chmod(0o755)
    (folder / "a").write_bytes(b"9")
    (folder / "sub/new\n").touch()
    (folder / "sub/deep/c").unlink()
    lost = DatasetVersionFactory(dataset=version.dataset, number=7)
    selectors.version_folder(lost).rmdir()
    unhashed = DatasetVersionFactory(dataset=version.dataset, number=8)
    slug = owner.organization.slug
    found = findings(repair=True)
    assert found[f"dataset {slug}/{version}"] == (
        Level.PROBLEM, "its files differ: a is changed, sub/new\\n is added, sub/deep/c is missing"
    )  # fmt: skip
    assert found[f"dataset {slug}/{lost}"][0] is Level.PROBLEM
    note = (Level.NOTE, "no file hashes were recorded when it was published")
    assert found[f"dataset {slug}/{unhashed}"] == note
    assert f"dataset {slug}/{version}" not in findings(with_hashes=False)
    with pytest.raises(SystemExit) as exit_:
        call_command("verify_storage", "--repair")
    assert exit_.value.code == 1
    assert "problem: 2, repaired: 0, note: 1" in capsys.readouterr().out


def test_a_damaged_model_is_a_problem(owner, root):
    (root / "best").mkdir()
    (root / "best" / "model.pt").write_bytes(b"weights")
    model = publish_model(owner, root)
    assert findings() == {}
    file = selectors.folder_of(model) / "best" / "model.pt"
    file.chmod(0o644)
    file.write_bytes(b"Weights")
    assert findings() == {
        f"model {owner.organization.slug}/{model}": (Level.PROBLEM, "its files are not those that were published")
    }


def test_repair_removes_what_no_row_names_and_counts_again(workspace, owner, monkeypatch, capsys):
    slug = owner.organization.slug
    (catalog.top_folder("datasets") / "orphan").mkdir()
    (catalog.top_folder("datasets") / "orphan" / "x").write_bytes(b"12345")
    (selectors.workspace_folder(workspace) / "by-a-run").write_bytes(b"123")
    lost = recycle_bin.delete(workspace=workspace, path="train.py")
    recycle_bin.path_in_bin(lost).unlink()
    found = findings()
    # Only a note, because garbage collection removes the folder a week after its last change.
    assert found["datasets/orphan"][0] is found[f"workspace {slug}/code"][0] is Level.NOTE
    assert found[f"recycle bin of {slug}/code"][0] is Level.PROBLEM
    monkeypatch.setattr(garbage_collection, "KEPT_AFTER_DELETION", timedelta(0))  # so the folder should be gone
    assert findings()["datasets/orphan"][0] is Level.PROBLEM
    call_command("verify_storage", "--repair")
    shown = capsys.readouterr().out
    assert "repaired: datasets/orphan: no row named it; it was removed (5 bytes)" in shown
    assert "problem: 0, repaired: 3, note: 0" in shown
    assert findings() == {}
    assert not DeletedFile.objects.exists()
    workspace.refresh_from_db()
    assert (workspace.size_bytes, workspace.entry_count) == (3, 2)


def test_differences_of_long_lists_are_found_in_order(tmp_path):
    def manifest(name, paths):
        path = tmp_path / name
        path.write_bytes(b"".join(digest * 64 + b"  " + each + b"\0" for each, digest in paths.items()))
        return path

    old = manifest("old", {b"a": b"1", b"b": b"1", b"x/a": b"1", b"x/y/z": b"1"})
    new = manifest("new", {b"a": b"1", b"aa": b"1", b"b": b"2", b"x/y/z": b"1", b"y/\xff": b"1"})
    found = [tuple(each) for each in manifests.differences(old=old, new=new)]
    assert found == [("aa", "added"), ("b", "changed"), ("x/a", "missing"), ("y/\udcff", "added")]
    assert list(manifests.differences(old=old, new=old)) == []
