"""Specs that a backend refuses before a run starts: their values, scripts, mounts and images."""

import dataclasses
from pathlib import Path

import pytest

from runtime.backends import admission
from runtime.errors import InvalidSpec
from runtime.images import venvs
from runtime.specs import Flavour, Image, Mount, Resources

REFUSED = (
    ({"name": "../job"}, "name"),
    ({"nodes": 0}, "nodes"),
    ({"workers_per_node": 0}, "workers_per_node"),
    ({"deadline_seconds": 0}, "deadline_seconds"),
    ({"grace_seconds": -1}, "grace_seconds"),
    ({"log_limit_bytes": 0}, "log_limit_bytes"),
    ({"resources": Resources(cpus=0, memory_mib=10)}, "resources"),
    ({"resources": Resources(cpus=1, memory_mib=0)}, "resources"),
    ({"checkpoint_key": "../other"}, "checkpoint_key"),
    ({"checkpoint_key": "other\n"}, "checkpoint_key"),
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
)
"""Values that no run can have, and the field that the refusal names."""


def test_a_run_that_can_never_start_is_refused(harness):
    (harness.workspace / "folder").mkdir()
    (harness.workspace / "loop").symlink_to("loop")
    (harness.folder / "outside.py").touch()
    (harness.workspace / "link_out_of_the_workspace").symlink_to(harness.folder / "outside.py")
    valid_mounts = harness.spec().mounts
    # A mount must appear in a folder for mounts, such as /datasets, and its source must be a folder.
    elsewhere, above = (Mount(str(harness.dataset), target) for target in ("/elsewhere", "/workspace/../etc"))
    missing, file = (Mount(str(harness.workspace / name), "/datasets/x") for name in ("missing", "train.py"))
    bad_mounts = [({"mounts": (*valid_mounts, mount)}, "mounts") for mount in (elsewhere, above, missing, file)]
    for changes, field in (*REFUSED, *bad_mounts):
        assert refused_field(harness, changes) == field, changes
    assert harness.backend.names() == []


def refused_field(harness, changes):
    """Submit a run with these changes, and return the field for which it is refused, or None."""
    try:
        harness.submit(**changes)
    except InvalidSpec as refusal:
        return refusal.field
    return None


def test_a_link_as_the_source_of_a_mount_is_resolved(harness):
    link = harness.folder / "link"
    link.symlink_to(harness.dataset)
    spec = harness.spec()
    spec = dataclasses.replace(spec, mounts=(spec.mounts[0], Mount(str(link), "/datasets/digits")))
    assert Path(admission.admit(spec, harness.images_root).mounts[1].source) == harness.dataset.resolve()


def test_a_missing_image_is_refused_with_the_build_command(tmp_path):
    with pytest.raises(InvalidSpec, match=r"manage\.py build_image pytorch"):
        admission.check_image(Image(builtin="pytorch"), tmp_path)


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
