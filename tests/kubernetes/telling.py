"""What a cluster has to say of a failed test: machines, Jobs, pods with their output, the last events.

The one rule: it never raises. What cannot be asked for is a line that says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from tests.kubernetes.sites import Site

_EVENTS = 60
_LOG_LINES = 60


def tell(site: Site, selector: str = "") -> str:
    """All that is in the site's namespace, or what has these labels, with the events of all."""
    return "\n".join(_lines(site, selector))


def _lines(site: Site, selector: str) -> Iterator[str]:
    core, namespace = site.core, site.namespace
    yield f"namespace {namespace}"
    for node in _asked(site, lambda: core.list_node().items):
        ready = {one["type"]: one["status"] for one in node["status"].get("conditions", [])}.get("Ready")
        spec = _short(node.get("spec") or {}, "taints", "unschedulable")
        yield f"machine {node['metadata']['name']}: ready {ready}, {spec}"
    for job in _asked(site, lambda: site.batch.list_namespaced_job(namespace, label_selector=selector).items):
        spec = _short(job["spec"], "suspend", "parallelism", "activeDeadlineSeconds")
        yield f"== Job {job['metadata']['name']}: {spec}"
        yield f"   {json.dumps(job.get('status'))}"
        yield from (f"   {key}: {text}" for key, text in (job["metadata"].get("annotations") or {}).items())
    for pod in _asked(site, lambda: core.list_namespaced_pod(namespace, label_selector=selector).items):
        meta, status = pod["metadata"], pod.get("status") or {}
        where = f"on {pod['spec'].get('nodeName')}, told to go: {meta.get('deletionTimestamp')}"
        yield f"== Pod {meta['name']}: {status.get('phase')} {status.get('reason') or ''}, {where}"
        yield from (
            f"   {_short(one, 'type', 'status', 'reason', 'message')}" for one in status.get("conditions") or []
        )
        yield from (f"   {_short(one, 'state', 'image')}" for one in status.get("containerStatuses") or [])
        yield from (f"   | {line}" for line in _log(site, meta["name"]))
    events = _asked(site, lambda: core.list_namespaced_event(namespace).items)
    for one in sorted(events, key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""))[-_EVENTS:]:
        about = one["involvedObject"]
        said = f"{one.get('reason')}: {one.get('message')}"
        yield f"{one.get('lastTimestamp')} {about.get('kind')} {about.get('name')}: {said} (x{one.get('count')})"


def _asked(site: Site, ask: Callable[[], Any]) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = site.client.sanitize_for_serialization(ask())
    except Exception as error:
        return [
            {"metadata": {"name": f"could not be asked for: {error}"}, "spec": {}, "status": {}, "involvedObject": {}}
        ]
    return found


def _log(site: Site, pod: str) -> list[str]:
    try:
        return site.log(pod, tailLines=str(_LOG_LINES)).splitlines()
    except Exception as error:
        return [f"no output: {error}".splitlines()[0]]


def _short(value: dict[str, Any], *names: str) -> str:
    return json.dumps({name: value[name] for name in names if value.get(name) is not None})
