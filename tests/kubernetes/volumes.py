"""A pod's volumes as folders of this machine, with the owners and modes that a kubelet gives them.

The one rule: what is not there fails the mount (the kubelet tries again), except where the volume's type says that it
is made; what is made belongs to root, mode 0755.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path

from tests.kubernetes.container import IS_ROOT, Bind
from tests.kubernetes.resources import ApiError, Object, quantity
from tests.kubernetes.store import Store

_FOLDER_TYPES = {"Directory": Path.is_dir, "File": Path.is_file}


class MountFailedError(Exception):
    """A volume that cannot be had now."""


def binds(store: Store, pod: Object, container: Object, folder: Path) -> tuple[Bind, ...]:
    """The container's mounts. `folder` is the pod's own on this node. Raises MountFailedError."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
    group = (pod["spec"].get("securityContext") or {}).get("fsGroup")
    made = []
    for mount in container.get("volumeMounts") or []:
        volume = volumes[mount["name"]]
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            size = int(quantity(volume["emptyDir"].get("sizeLimit", 0)))
            made.append(Bind(mount["mountPath"], tmpfs_bytes=size))
            continue
        source = _source(store, pod, volume, folder, group)
        if mount.get("subPath"):
            source = _below(source, mount["subPath"])
        made.append(Bind(mount["mountPath"], source, read_only=bool(mount.get("readOnly")) or _is_read_only(volume)))
    return tuple(made)


def _below(volume: Path, path: str) -> Path:
    """A folder of the volume; one that is made there belongs to root, with the mode of the volume's own."""
    found = volume
    for part in Path(path).parts:
        found /= part
        if not found.exists():
            found.mkdir()
            found.chmod(volume.stat().st_mode & 0o7777)
    return found


def _is_read_only(volume: Object) -> bool:
    claim = volume.get("persistentVolumeClaim", {}).get("readOnly", False)
    return bool(claim) or any(kind in volume for kind in ("configMap", "secret", "downwardAPI", "projected"))


def _source(store: Store, pod: Object, volume: Object, folder: Path, group: int | None) -> Path:
    own = folder / "volumes" / volume["name"]
    if "hostPath" in volume:
        return _host_path(Path(volume["hostPath"]["path"]), volume["hostPath"]["type"])
    if "persistentVolumeClaim" in volume:
        return _claimed(store, pod["metadata"]["namespace"], volume["persistentVolumeClaim"]["claimName"])
    if own.exists():
        return own
    own.mkdir(parents=True)
    if "emptyDir" in volume:
        own.chmod(0o777)
        _give(own, group)
        return own
    for kind, plural, name in (("configMap", "configmaps", "name"), ("secret", "secrets", "secretName")):
        if kind in volume:
            told = volume[kind]
            try:
                found = store.get(plural, pod["metadata"]["namespace"], told[name])
            except ApiError as error:
                if told.get("optional"):
                    return own
                own.rmdir()
                message = (
                    f'MountVolume.SetUp failed for volume "{volume["name"]}" : {kind.lower()} "{told[name]}" not found'
                )
                raise MountFailedError(message) from error
            _write(own, _content(found), told, group)
            return own
    raise NotImplementedError(volume)


def _host_path(path: Path, kind: str) -> Path:
    if kind == "DirectoryOrCreate" and not path.exists():
        path.mkdir(parents=True, mode=0o755)
        path.chmod(0o755)
    if kind in _FOLDER_TYPES and not _FOLDER_TYPES[kind](path):
        raise MountFailedError(f"hostPath type check failed: {path} is not a {kind.lower()}")
    if not path.exists():
        path.mkdir(parents=True, mode=0o755)
    return path


def _claimed(store: Store, namespace: str, name: str) -> Path:
    claim = store.get("persistentvolumeclaims", namespace, name)
    volume = store.get("persistentvolumes", "", claim["spec"]["volumeName"])
    return Path(volume["spec"]["hostPath"]["path"])


def _content(found: Object) -> dict[str, bytes]:
    if found["kind"] == "Secret":
        return {name: base64.b64decode(value) for name, value in (found.get("data") or {}).items()}
    plain = {name: value.encode() for name, value in (found.get("data") or {}).items()}
    return plain | {name: base64.b64decode(value) for name, value in (found.get("binaryData") or {}).items()}


def _write(folder: Path, content: dict[str, bytes], told: Object, group: int | None) -> None:
    items = told.get("items") or [{"key": name, "path": name} for name in content]
    for item in items:
        path = folder / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[item["key"]])
        path.chmod(item.get("mode", told["defaultMode"]) | (0o040 if group is not None else 0))
        _give(path, group)


def _give(path: Path, group: int | None) -> None:
    if group is not None and IS_ROOT:
        os.chown(path, 0, group)
