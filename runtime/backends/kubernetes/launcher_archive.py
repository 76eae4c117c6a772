"""Pack the launcher into a zip archive and keep it in the cluster, one ConfigMap per version and namespace.

The same sources give the same bytes on every machine, because the ConfigMap's name contains their digest. The archive
is not compressed, since zlib versions compress differently.

During an upgrade several versions of the console run at the same time. Each one renews the last-used annotation of its
launcher, and removes another version's launcher only when no console and no run uses that any more.
"""

from __future__ import annotations

import functools
import io
import logging
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from runtime import launcher
from runtime.backends.kubernetes import manifests, names
from runtime.backends.kubernetes.client import ApiClient, ApiError, Object, resource_path
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.objects import object_annotations, object_labels, timestamp

logger = logging.getLogger(__name__)

USAGE_REFRESH_SECONDS = 3600.0
"""Minimum interval between updates of the last-used annotation. It is far below UNUSED_SECONDS, so a failed update does
no harm."""
UNUSED_SECONDS = 24 * 3600.0
"""How long a launcher must be unused before it is removed. Consoles of some older versions do not set the annotation.
So launchers are removed only where this version's own ConfigMap is also this old. Then the upgrade was a day ago, and
no older console runs."""
MAX_BYTES = 1 << 20
"""Size limit of a ConfigMap in Kubernetes."""
_PACKAGE = "launcher"
"""The launcher's package in the archive."""
_MAIN = """import signal
import sys

if "--pod" in sys.argv:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

from launcher.__main__ import start

start()
"""
"""`__main__.py` of the archive. It first blocks SIGTERM: the kernel drops a signal that a Pod's first process does not
handle, but keeps a blocked one until the process handles it."""
_ENTRY_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip archive can hold. A fixed time, so that the digest depends on the sources only."""
_ENTRY_MODE = 0o100644 << 16
"""A regular file, rw-r--r--; zip archives keep Unix modes in the upper 16 bits."""


@functools.lru_cache(maxsize=1)
def build() -> bytes:
    """Return the archive of the launcher in this console's version."""
    return pack(Path(launcher.__file__).parent)


def pack(folder: Path) -> bytes:
    """Return an archive with an entry point and the modules of the package in `folder`.

    Raises ValueError if a ConfigMap cannot hold it.
    """
    sources = {
        f"{_PACKAGE}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in sorted(folder.rglob("*.py"))
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, source in {"__main__.py": _MAIN.encode(), **sources}.items():
            entry = zipfile.ZipInfo(name, _ENTRY_TIME)
            entry.external_attr = _ENTRY_MODE
            entry.create_system = 3  # always Unix, since the bytes must be the same everywhere
            archive.writestr(entry, source)
    data = stream.getvalue()
    if len(data) >= MAX_BYTES:
        raise ValueError(f"The launcher has {len(data)} bytes; a ConfigMap holds fewer than {MAX_BYTES}.")
    return data


class LauncherConfigMaps:
    """The ConfigMaps that hold launchers in one cluster."""

    def __init__(self, api: ApiClient, config: ClusterConfig) -> None:
        self._api = api
        self._config = config
        self._refreshed_at: dict[str, float] = {}
        """By namespace: when this process last set the last-used annotation (monotonic)."""

    def ensure(self, namespace: str) -> str:
        """Create or refresh the ConfigMap of this version's launcher and return its name.

        Raises ApiError, BackendUnavailable.
        """
        manifest = manifests.launcher(namespace, build())
        meta = manifest["metadata"]
        now, refreshed_at = time.monotonic(), self._refreshed_at.get(namespace)
        if refreshed_at is None or now > refreshed_at + USAGE_REFRESH_SECONDS:
            used_meta = {**meta, "annotations": {names.LAST_USED_ANNOTATION: repr(time.time())}}
            self._api.apply({**manifest, "metadata": used_meta})
            self._refreshed_at[namespace] = now
        return str(meta["name"])

    def remove_unused(self, jobs: Iterable[Object]) -> None:
        """Remove the launchers that nothing uses any more. `jobs`: the Jobs of all runs. Raises BackendUnavailable."""
        mounted_config_maps = _mounted_config_maps(jobs)
        our_name = manifests.launcher("", build())["metadata"]["name"]
        namespace = "" if self._config.namespace_per_organization else self._config.namespace
        selector = f"{names.MANAGED_BY_LABEL}={names.MANAGER},{names.COMPONENT_LABEL}={names.LAUNCHER_COMPONENT}"
        try:
            config_maps = self._api.list(resource_path("v1", "configmaps", namespace), labelSelector=selector)["items"]
            # Namespaces in which this version's launcher is so old that no console of an older version runs any more.
            settled_namespaces = {
                config_map["metadata"]["namespace"]
                for config_map in config_maps
                if config_map["metadata"]["name"] == our_name and _is_old(_created_at(config_map))
            }
            for config_map in config_maps:
                meta = config_map["metadata"]
                is_used = (
                    meta["name"] == our_name
                    or (meta["namespace"], meta["name"]) in mounted_config_maps
                    or not _is_old(_last_used_at(config_map))
                )
                if meta["namespace"] in settled_namespaces and not is_used:
                    # With the version as a precondition, the server keeps a ConfigMap that a console has just used.
                    path = resource_path("v1", "configmaps", meta["namespace"], meta["name"])
                    self._api.delete(path, version=meta["resourceVersion"])
        except ApiError as error:
            # The console's role may date from an older version, without this permission; `check_cluster` reports that.
            logger.warning("Launchers of old versions stay in the cluster %s: %s", self._config.name, error)


def _mounted_config_maps(jobs: Iterable[Object]) -> set[tuple[str, str]]:
    """Return the namespace and name of each ConfigMap that the Pods of live runs mount."""
    mounted = set()
    for job in jobs:
        if names.ENDED_LABEL not in object_labels(job):
            for volume in job["spec"]["template"]["spec"].get("volumes") or []:
                if "configMap" in volume:
                    mounted.add((job["metadata"]["namespace"], volume["configMap"]["name"]))
    return mounted


def _created_at(config_map: Object) -> float:
    return timestamp(config_map["metadata"]["creationTimestamp"]) or 0.0


def _last_used_at(config_map: Object) -> float:
    """Return when a console last used the launcher (Unix seconds). An unreadable annotation counts as now."""
    try:
        return max(float(object_annotations(config_map).get(names.LAST_USED_ANNOTATION, "0")), _created_at(config_map))
    except ValueError:
        return time.time()


def _is_old(at: float) -> bool:
    return time.time() > at + UNUSED_SECONDS
