"""Specs that a backend refuses before a run starts: their values, scripts, mounts and images."""

import dataclasses
from pathlib import Path

import pytest

from runtime.backends import admission
from runtime.errors import InvalidSpec
from runtime.images import venvs
from runtime.specs import Flavour, Image, Mount, Resources

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "../job"}, "name"),
        ({"nodes": 0}, "nodes"),
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"grace_seconds": -1}, "grace_seconds"),
        ({"log_limit_bytes": 0}, "log_limit_bytes"),
        ({"resources": Resources(cpus=0, memory_mib=10)}, "resources"),
        ({"resources": Resources(cpus=1, memory_mib=0)}, "resources"),
        ({"checkpoint_key": "../other"}, "checkpoint_key"),
        ({"image": Image(builtin="unknown")}, "image"),
        ({"image": Image(builtin="../bare")}, "image"),
        ({"image": Image(reference="docker.io/x")}, "image"),  # a local backend has built-in images only
        ({"workspace_target": "/usr/local"}, "mounts"),
        ({"datasets_target": "/"}, "mounts"),
        ({"workspace_target": "workspace"}, "mounts"),
        ({"script": ""}, "script"),
        ({"script": "/etc/passwd"}, "script"),
        ({"script": "../workspace/train.py"}, "script"),
        ({"script": "folder"}, "script"),
        ({"script": "loop"}, "script"),
        ({"script": "link_out_of_the_workspace"}, "script"),
        ({"mounts": ()}, "mounts"),  # no workspace
    ],
)
def test_a_run_that_can_never_start_is_refused(harness, changes, field):
    (harness.workspace / "folder").mkdir()
    (harness.workspace / "loop").symlink_to("loop")
    (harness.folder / "outside.py").touch()
    (harness.workspace / "link_out_of_the_workspace").symlink_to(harness.folder / "outside.py")
    with pytest.raises(InvalidSpec) as caught:
        harness.submit(**changes)
    assert caught.value.field == field
    assert harness.backend.names() == []


@pytest.mark.parametrize(
    ("source", "target"),
    [("", "/elsewhere"), ("", "/workspace/../etc"), ("missing", "/datasets/x"), ("file", "/datasets/x")],
    ids=["unknown target", "target with ..", "missing source", "source that is no folder"],
)
def test_a_mount_with_a_bad_source_or_target_is_refused(harness, source, target):
    (harness.folder / "file").touch()
    spec = harness.spec()
    spec = dataclasses.replace(spec, mounts=(*spec.mounts, Mount(str(harness.folder / source), target)))
    with pytest.raises(InvalidSpec) as caught:
        admission.admit(spec, harness.images_root)
    assert caught.value.field == "mounts"


def test_a_link_as_the_source_of_a_mount_is_resolved(harness):
    link = harness.folder / "link"
    link.symlink_to(harness.dataset)
    spec = harness.spec()
    spec = dataclasses.replace(spec, mounts=(spec.mounts[0], Mount(str(link), "/datasets/digits")))
    assert Path(admission.admit(spec, harness.images_root).mounts[1].source) == harness.dataset.resolve()


def test_a_missing_image_is_refused_with_the_build_command(harness):
    with pytest.raises(InvalidSpec, match=r"manage\.py build_image pytorch"):
        harness.submit(image=Image(builtin="pytorch"))


def test_an_image_that_would_leave_gpus_idle_is_refused(tmp_path):
    (tmp_path / "tensorflow").mkdir()
    image = Image(builtin="tensorflow")
    venvs.mark_ready(tmp_path / "tensorflow", "digest", Flavour.CUDA)
    admission.check_image(image, tmp_path, gpus=1)
    venvs.mark_ready(tmp_path / "tensorflow", "digest", Flavour.CPU)
    admission.check_image(image, tmp_path)
    with pytest.raises(InvalidSpec) as caught:
        admission.check_image(image, tmp_path, gpus=1)
    assert caught.value.field == "gpus"
