"""What changes on a cluster, as it changes: watches of Jobs, pods and their events, each on a thread of its own.

The one rule: a watch is never trusted to be whole. Each begins with a list, goes on from the version that it has seen
last, and lists again when that is too old; what a list shows that was not there before is a change like any other.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping

from runtime.backends.kubernetes_api import Api, Gone, Object, Refused
from runtime.backends.kubernetes_names import ENDED_LABEL, MANAGED_BY, MANAGER, RUN_LABEL
from runtime.errors import BackendUnavailable

HEARTBEAT_SECONDS = 0.5
_WATCH_SECONDS = 240
_GATHER_SECONDS = 0.02
"""Changes that come together are told together."""
_AGAIN_SECONDS = (0.2, 5.0)

_ENDED = frozenset({"Succeeded", "Failed"})

Look = Callable[[str, str, Object], None]
LISTED = "LISTED"
"""A change that is a whole list: what follows goes on from there."""


_OURS = f"{MANAGED_BY}={MANAGER},{RUN_LABEL}"
_QUERIES: dict[str, dict[str, str]] = {
    "jobs": {"labelSelector": f"{_OURS},!{ENDED_LABEL}"},
    "pods": {"labelSelector": _OURS},
    "events": {"fieldSelector": "type!=Normal"},
}


class Watches:
    """Follows a cluster until `close`. `paths`: what to follow, by kind: jobs, pods, events."""

    def __init__(self, api: Api, paths: Mapping[str, str], look: Look) -> None:
        """`look` is told of each change, its kind and type and the object, on its watch's thread; it must not raise."""
        self._api = api
        self._look = look
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._owners: dict[str, str] = {}
        for kind, path in paths.items():
            threading.Thread(target=self._follow, args=(kind, path), name=f"watch-{kind}", daemon=True).start()

    def close(self) -> None:
        """End the threads, each at its next event."""
        self._closed.set()

    def tell(self, name: str) -> None:
        """Something about this run changed."""
        self._news.put(name)

    def changed(self) -> set[str]:
        """The runs that changed; empty after a while without any."""
        names = set()
        with contextlib.suppress(queue.Empty):
            names.add(self._news.get(timeout=HEARTBEAT_SECONDS))
            until = time.monotonic() + _GATHER_SECONDS
            while time.monotonic() < until:
                names.add(self._news.get(timeout=max(0.0, until - time.monotonic())))
        return names

    def _follow(self, kind: str, path: str) -> None:
        query = _QUERIES[kind]
        version, pause = "", _AGAIN_SECONDS[0]
        known: dict[str, str] = {}
        while not self._closed.is_set():
            try:
                if not version:
                    version = self._list(kind, path, query, known)
                for event in self._api.watch(path, version, _WATCH_SECONDS, **query):
                    if self._closed.is_set():
                        return
                    version = event["object"]["metadata"]["resourceVersion"]
                    pause = _AGAIN_SECONDS[0]
                    if event["type"] != "BOOKMARK":
                        self._take(kind, event["type"], event["object"], known)
            except Gone:
                version = ""
            except (BackendUnavailable, Refused):
                version = ""
                self._closed.wait(pause * random.uniform(0.5, 1.5))  # noqa: S311 - so that not all come back at once
                pause = min(pause * 2, _AGAIN_SECONDS[1])

    def _list(self, kind: str, path: str, query: Mapping[str, str], known: dict[str, str]) -> str:
        """Read it whole, and tell what is new, what is different and what is gone since `known`."""
        listed = self._api.list(path, **query)
        self._look(kind, LISTED, listed)
        first, there = not known, {}
        for item in listed["items"]:
            meta = item["metadata"]
            there[meta["uid"]] = meta["resourceVersion"]
            # What ended before we looked is told by its Job, if anything of it is still open.
            if first and kind == "pods" and (item.get("status") or {}).get("phase") in _ENDED:
                continue
            if known.get(meta["uid"]) != meta["resourceVersion"]:
                self._take(kind, "MODIFIED", item, known)
        for uid in set(known) - set(there):
            del known[uid]
            if uid in self._owners:
                self.tell(self._owners.pop(uid))
        known.update(there)
        return str(listed["metadata"]["resourceVersion"])

    def _take(self, kind: str, change: str, item: Object, known: dict[str, str]) -> None:
        meta = item["metadata"]
        if kind == "events":
            name = self._owners.get((item.get("involvedObject") or {}).get("uid", ""))
            if name is not None and change != "DELETED":
                self.tell(name)
            return
        name = (meta.get("labels") or {}).get(RUN_LABEL, "")
        if change == "DELETED":
            known.pop(meta["uid"], None)
            self._owners.pop(meta["uid"], None)
        else:
            known[meta["uid"]] = meta["resourceVersion"]
            self._owners[meta["uid"]] = name
        self._look(kind, change, item)
        if name:
            self.tell(name)
