from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runtime.backends import admission
from runtime.errors import InvalidSpec
from runtime.specs import Image, Mount, Resources

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "Job_1"}, "name"),
        ({"name": "../job"}, "name"),
        ({"nodes": 0}, "nodes"),
        ({"workers_per_node": 0}, "workers_per_node"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"grace_seconds": -1}, "grace_seconds"),
        ({"log_limit_bytes": 0}, "log_limit_bytes"),
        ({"resources": Resources(cpus=0, memory_mib=10)}, "resources"),
        ({"resources": Resources(cpus=1, memory_mib=0)}, "resources"),
        ({"checkpoint_key": "../other"}, "checkpoint_key"),
        ({"checkpoint_key": ".hidden"}, "checkpoint_key"),
        ({"image": Image(builtin="unknown")}, "image"),
        ({"image": Image(builtin="../bare")}, "image"),
        ({"image": Image(reference="docker.io/x")}, "image"),
        ({"workspace_target": "/usr/local"}, "mounts"),
        ({"datasets_target": "/"}, "mounts"),
        ({"workspace_target": "workspace"}, "mounts"),
        ({"script": ""}, "script"),
        ({"script": "missing.py"}, "script"),
        ({"script": "/etc/passwd"}, "script"),
        ({"script": "../workspace/train.py"}, "script"),
        ({"script": "folder"}, "script"),
        ({"script": "train.py/inner"}, "script"),
        ({"script": "loop"}, "script"),
        ({"mounts": ()}, "mounts"),
    ],
)
def test_what_can_never_start_is_refused(yard: Yard, changes: dict[str, Any], field: str) -> None:
    (yard.workspace / "folder").mkdir()
    (yard.workspace / "loop").symlink_to("loop")
    with pytest.raises(InvalidSpec) as caught:
        yard.backend.submit(yard.spec(**changes))
    assert caught.value.field == field
    assert yard.backend.names() == []


@pytest.mark.parametrize(
    ("source", "target"),
    [("", "/elsewhere"), ("", "/workspace/../etc"), ("missing", "/datasets/x"), ("file", "/datasets/x")],
)
def test_mounts_are_checked(yard: Yard, source: str, target: str) -> None:
    (yard.folder / "file").touch()
    spec = yard.spec()
    spec = dataclasses.replace(spec, mounts=(*spec.mounts, Mount(str(yard.folder / source), target)))
    with pytest.raises(InvalidSpec) as caught:
        admission.check(spec, yard.images_root)
    assert caught.value.field == "mounts"


def test_sources_are_resolved(yard: Yard) -> None:
    link = yard.folder / "link"
    link.symlink_to(yard.dataset)
    spec = yard.spec()
    spec = dataclasses.replace(spec, mounts=(spec.mounts[0], Mount(str(link), "/datasets/digits")))
    assert Path(admission.check(spec, yard.images_root).mounts[1].source) == yard.dataset.resolve()


def test_an_image_that_is_not_built_says_how_to_build_it(yard: Yard) -> None:
    with pytest.raises(InvalidSpec, match=r"manage\.py build_image pytorch"):
        yard.backend.submit(yard.spec(image=Image(builtin="pytorch")))
