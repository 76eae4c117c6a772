"""Follow a cluster's Jobs, Pods and events by watches, each on a thread of its own.

A watch can lose events. So each thread starts with a list, and watches from the last resourceVersion that it saw. If
that version has expired or a request failed, it lists again. Differences between two lists are reported like events.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from runtime.backends.kubernetes.client import ApiClient, ApiError, Object, ResourceVersionExpired
from runtime.backends.kubernetes.names import LIVE_RUN_SELECTOR, RUN_LABEL, RUN_SELECTOR
from runtime.backends.kubernetes.objects import TERMINAL_PHASES, object_labels, pod_phase
from runtime.backends.kubernetes.state import SpecSummary
from runtime.errors import BackendUnavailable

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
"""How long `wait_for_changes` waits: half a second, since `Backend.changes` promises a heartbeat every second."""
_WATCH_SECONDS = 240
"""How long one watch request lasts; load balancers often close connections after 5 minutes."""
_BATCH_SECONDS = 0.02
"""How long to collect further changes after the first. The start of a run changes many objects within milliseconds."""
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.2, 5.0
"""Pause after a watch has ended or failed, before the next request. It doubles each time, until an event arrives. The
maximum bounds how late the first changes are reported when the server is back."""

ChangeListener = Callable[[str, str, Object], None]
"""Called with the kind (`jobs`, `pods`), the type of change (ADDED, MODIFIED, DELETED or LISTED) and the object. The
kind `events` comes with LISTED only."""
LISTED = "LISTED"
"""A type of change that Kubernetes does not have: the object is the result of a whole list. Objects that the list
lacks are gone; those that are new or have changed follow as MODIFIED."""

# Which objects of each collection are followed. Events of the type Normal are left out, since they report no problem.
_QUERIES: dict[str, dict[str, str]] = {
    "jobs": {"labelSelector": LIVE_RUN_SELECTOR},
    "pods": {"labelSelector": RUN_SELECTOR},
    "events": {"fieldSelector": "type!=Normal"},
}


class RunSize(NamedTuple):
    """How many nodes and ranks a run has."""

    nodes: int
    ranks: int


class RunningRuns:
    """The runs that may write output: their Job is live (LIVE_RUN_SELECTOR), and one of their Pods runs.

    The watcher's threads call `observe`, each with objects of one kind.
    """

    def __init__(self) -> None:
        self._live_jobs: dict[str, tuple[str, RunSize]] = {}
        """The run's name and size, by its Job's UID."""
        self._running_pods: dict[str, str] = {}
        """The run's name, by the Pod's UID."""

    def observe(self, kind: str, change: str, item: Object) -> None:
        """Process one change of a Job or Pod, as for a `ChangeListener`."""
        tracked: dict[str, Any] = self._live_jobs if kind == "jobs" else self._running_pods
        if change == LISTED:  # what the list lacks has vanished since the last one, without an event
            for uid in tracked.keys() - {listed["metadata"]["uid"] for listed in item["items"]}:
                del tracked[uid]
            return
        uid, name = item["metadata"]["uid"], object_labels(item).get(RUN_LABEL, "")
        # A Job also leaves the watch, as DELETED, when its run's final status is stored.
        if change == "DELETED" or (kind == "pods" and pod_phase(item) != "Running"):
            tracked.pop(uid, None)
        elif kind == "jobs":
            nodes = item["spec"]["completions"]
            tracked[uid] = (name, RunSize(nodes, nodes * SpecSummary.from_job(item).workers))
        else:
            tracked[uid] = name

    def sizes(self) -> dict[str, RunSize]:
        """Return the size of each run that may write output, by its name."""
        running_names = set(self._running_pods.copy().values())
        return {name: size for name, size in self._live_jobs.copy().values() if name in running_names}


class Watcher:
    """Follows a cluster until `close`."""

    def __init__(self, api: ApiClient, paths: Mapping[str, str], listener: ChangeListener) -> None:
        """Start one thread for each kind in `paths` (`jobs`, `pods`, `events`), whose value is the collection's path.

        `listener` is called on those threads and must not raise.
        """
        self._api = api
        self._listener = listener
        self._changed_runs: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._run_by_uid: dict[str, str] = {}
        """The name of the run of each known Job and Pod, by the object's UID."""
        for kind, path in paths.items():
            threading.Thread(target=self._follow, args=(kind, path), name=f"watch-{kind}", daemon=True).start()

    def close(self) -> None:
        """Stop the threads, each at its next event or at the end of its watch request (_WATCH_SECONDS)."""
        self._closed.set()

    def wait_for_changes(self) -> set[str]:
        """Wait up to HEARTBEAT_SECONDS for a change; return the names of the changed runs, or an empty set."""
        names = set()
        with contextlib.suppress(queue.Empty):
            names.add(self._changed_runs.get(timeout=HEARTBEAT_SECONDS))
            batch_ends_at = time.monotonic() + _BATCH_SECONDS
            while (remaining := batch_ends_at - time.monotonic()) > 0:
                names.add(self._changed_runs.get(timeout=remaining))
        return names

    def _follow(self, kind: str, path: str) -> None:
        """Report the changes of one collection until `close`. Runs on a thread of its own."""
        query = _QUERIES[kind]
        version, retry_seconds, logged_error = "", _MIN_RETRY_SECONDS, ""
        versions: dict[str, str] = {}  # the resourceVersion of each object, by UID
        while not self._closed.is_set():
            try:
                if not version:
                    version = self._list(kind, path, query, versions)
                for event in self._api.watch(path, version, _WATCH_SECONDS, **query):
                    if self._closed.is_set():
                        return
                    version = event["object"]["metadata"]["resourceVersion"]
                    retry_seconds, logged_error = _MIN_RETRY_SECONDS, ""
                    if event["type"] != "BOOKMARK":
                        self._process(kind, event["type"], event["object"], versions)
            except (ResourceVersionExpired, BackendUnavailable):  # the console reports a cluster that does not answer
                version = ""
            except ApiError as error:
                version = ""
                if str(error) != logged_error:
                    logged_error = str(error)
                    logger.warning("%s cannot be watched (%s), so changes of runs are noticed later.", path, error)
            # Also after a watch that has ended without an error: a proxy may close each one at once.
            self._closed.wait(retry_seconds * random.uniform(0.5, 1.5))  # noqa: S311 - spreads the consoles' requests
            retry_seconds = min(retry_seconds * 2, _MAX_RETRY_SECONDS)

    def _list(self, kind: str, path: str, query: Mapping[str, str], versions: dict[str, str]) -> str:
        """List the collection, report its differences from `versions`, and return its resourceVersion."""
        listing = self._api.list(path, **query)
        self._listener(kind, LISTED, listing)
        is_first = not versions
        listed_versions: dict[str, str] = {}
        for item in listing["items"]:
            meta = item["metadata"]
            listed_versions[meta["uid"]] = meta["resourceVersion"]
            # Pods that ended before the first list are skipped. If the end of their run is not stored yet, the list of
            # Jobs reports the run.
            if is_first and kind == "pods" and pod_phase(item) in TERMINAL_PHASES:
                continue
            if versions.get(meta["uid"]) != meta["resourceVersion"]:
                self._process(kind, "MODIFIED", item, versions)
        for uid in set(versions) - set(listed_versions):
            del versions[uid]
            if uid in self._run_by_uid:
                self._changed_runs.put(self._run_by_uid.pop(uid))
        versions.update(listed_versions)
        return str(listing["metadata"]["resourceVersion"])

    def _process(self, kind: str, change: str, item: Object, versions: dict[str, str]) -> None:
        """Report one change to `wait_for_changes`, and a change of a Job or Pod also to the listener.

        Updates `versions` (see `_follow`).
        """
        if kind == "events":
            name = self._run_by_uid.get((item.get("involvedObject") or {}).get("uid", ""))
            if name is not None and change != "DELETED":
                self._changed_runs.put(name)
            return
        meta, name = item["metadata"], object_labels(item).get(RUN_LABEL, "")
        if change == "DELETED":
            versions.pop(meta["uid"], None)
            self._run_by_uid.pop(meta["uid"], None)
        else:
            versions[meta["uid"]] = meta["resourceVersion"]
            self._run_by_uid[meta["uid"]] = name
        self._listener(kind, change, item)
        if name:
            self._changed_runs.put(name)
