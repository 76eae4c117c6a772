"""A Pod's volumes as folders of this machine, with the owners and modes that a kubelet sets.

A volume that does not exist fails the mount, and the kubelet retries.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path

from tests.kubernetes.container import IS_ROOT, Bind
from tests.kubernetes.resources import ApiError, Object, quantity
from tests.kubernetes.store import Store


class MountFailedError(Exception):
    """A volume cannot be mounted now. `reason` is the reason in the Pod's event."""

    def __init__(self, message: str, reason: str = "FailedMount") -> None:
        super().__init__(message)
        self.reason = reason


def binds(store: Store, pod: Object, container: Object, folder: Path) -> tuple[Bind, ...]:
    """Return a container's mounts. `folder` is the Pod's folder on its node's disk. Raises MountFailedError."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
    group = (pod["spec"].get("securityContext") or {}).get("fsGroup")
    new = []
    for mount in container.get("volumeMounts") or []:
        volume, target = volumes[mount["name"]], mount["mountPath"]
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            new.append(Bind(target, tmpfs_bytes=int(quantity(volume["emptyDir"]["sizeLimit"]))))
            continue
        source = _sub_path(_source(store, pod, volume, folder, group), mount.get("subPath", ""))
        read_only = bool(mount.get("readOnly")) or "configMap" in volume or "secret" in volume
        new.append(Bind(target, source, read_only=read_only))
    return tuple(new)


def _sub_path(volume: Path, path: str) -> Path:
    """Return a folder of the volume. A new one belongs to root and has the mode of the volume."""
    folder = volume
    for part in Path(path).parts:
        folder /= part
        if not folder.exists():
            folder.mkdir()
            folder.chmod(volume.stat().st_mode & 0o7777)
    return folder


def _source(store: Store, pod: Object, volume: Object, folder: Path, group: int | None) -> Path:
    if "hostPath" in volume:
        path = Path(volume["hostPath"]["path"])
        if not path.is_dir():
            raise MountFailedError(f"hostPath type check failed: {path} is not a directory")
        return path
    if "persistentVolumeClaim" in volume:
        return _claimed(store, pod, volume["persistentVolumeClaim"]["claimName"])
    own = folder / "volumes" / volume["name"]
    if "emptyDir" in volume:
        own.mkdir(parents=True, exist_ok=True)
        own.chmod(0o777)
        _set_group(own, group)
        return own
    name = volume["configMap"]["name"]
    try:
        config_map = store.get("configmaps", pod["metadata"]["namespace"], name)
    except ApiError as error:
        message = f'MountVolume.SetUp failed for volume "{volume["name"]}" : configmap "{name}" not found'
        raise MountFailedError(message) from error
    own.mkdir(parents=True, exist_ok=True)
    files = {name: text.encode() for name, text in (config_map.get("data") or {}).items()}
    files |= {name: base64.b64decode(data) for name, data in (config_map.get("binaryData") or {}).items()}
    for name, content in files.items():
        (own / name).write_bytes(content)
        (own / name).chmod(volume["configMap"]["defaultMode"] | (0o040 if group is not None else 0))
        _set_group(own / name, group)
    return own


def volume_of(store: Store, namespace: str, claim: str) -> Object:
    """Return the PersistentVolume of a bound claim."""
    bound = store.get("persistentvolumeclaims", namespace, claim)
    return store.get("persistentvolumes", "", bound["spec"]["volumeName"])


def _claimed(store: Store, pod: Object, claim: str) -> Path:
    """Return a claim's folder. A ReadWriteOnce volume is attached to one node only."""
    namespace, node = pod["metadata"]["namespace"], pod["spec"]["nodeName"]
    bound = volume_of(store, namespace, claim)
    if "ReadWriteMany" not in bound["spec"]["accessModes"]:

        def is_elsewhere(other: Object) -> bool:
            claims = [one.get("persistentVolumeClaim", {}).get("claimName") for one in other["spec"]["volumes"]]
            is_live = other["status"]["phase"] not in {"Succeeded", "Failed"}
            return is_live and other["spec"].get("nodeName") not in {None, node} and claim in claims

        if users := store.find("pods", namespace, is_elsewhere):
            what = bound["metadata"]["name"]
            message = f'Multi-Attach error for volume "{what}" Volume is already used by {len(users)} pod(s)'
            raise MountFailedError(message, reason="FailedAttachVolume")
    return Path(bound["spec"]["hostPath"]["path"])


def _set_group(path: Path, group: int | None) -> None:
    if group is not None and IS_ROOT:
        os.chown(path, 0, group)
