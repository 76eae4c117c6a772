"""A machine of a real cluster that falls silent: its kubelet stands still, and what our run had there is dead.

The one rule: it mends itself. A pod of ours on that very machine lets the kubelet go on after a while, whether anybody
lives who could tell it to or not; nobody else's processes are touched.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

import pytest

from tests.kubernetes.resources import Object
from tests.kubernetes.sites import IMAGE
from tests.kubernetes.staged import StagedSite

SILENT_SECONDS = 150
"""A machine is found not ready 40 to 50 s after its kubelet was last heard of."""
_READY_SECONDS = 240.0
SCRIPT = """
import os, signal, sys, time
name, pod, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])

def read(pid, what):
    try:
        with open("/proc/%s/%s" % (pid, what)) as file:
            return file.read()
    except OSError:
        return ""

pids = [pid for pid in os.listdir("/proc") if pid.isdecimal()]
found = [int(pid) for pid in pids if read(pid, "comm").strip() == name]
if not found:
    sys.exit("no process is called " + name)

def mend(*_):
    for pid in found:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass

signal.signal(signal.SIGTERM, lambda *_: sys.exit(mend()))
try:
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    marks = (pod, pod.replace("-", "_"))
    for pid in pids:
        if any(mark in read(pid, "cgroup") for mark in marks):
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
    print("silent", flush=True)
    time.sleep(seconds)
finally:
    mend()
"""


def may_crash() -> None:
    """Skip where nobody has said that a machine may fall silent for a while."""
    if not os.environ.get("TRAINYARD_TEST_CRASH"):
        pytest.skip("TRAINYARD_TEST_CRASH=1 lets one machine's kubelet stand still for some minutes.")


def silence(site: StagedSite, pod: Any) -> None:
    """From about now on the machine of this pod of a run is not heard of, and the pod is dead."""
    name = f"crash-{secrets.token_hex(4)}"
    site.core.create_namespaced_pod(site.namespace, _pod(name, pod.spec.node_name, pod.metadata.uid))
    give_up_at = time.monotonic() + 60
    while True:
        found = site.core.read_namespaced_pod(name, site.namespace)
        states = [one.state.to_dict() for one in found.status.container_statuses or []]
        if any(state["terminated"] for state in states):
            pytest.skip(f"The machine {pod.spec.node_name} cannot be silenced: {site.log(name)}")
        if any(state["running"] for state in states):
            return
        # A kubelet that stands still so soon says nothing of the pod that did it, nor does its log come.
        if time.monotonic() > give_up_at or _is_silent(site, pod.spec.node_name):
            return
        time.sleep(0.2)


def await_ready(site: StagedSite, machine: str) -> None:
    """Until the machine is heard of again, and takes pods."""
    give_up_at = time.monotonic() + SILENT_SECONDS + _READY_SECONDS
    while _is_silent(site, machine) or any(
        taint.key.startswith("node.kubernetes.io/") for taint in site.core.read_node(machine).spec.taints or []
    ):
        assert time.monotonic() < give_up_at, f"The machine {machine} has not come back."
        time.sleep(1)


def _is_silent(site: StagedSite, machine: str) -> bool:
    conditions = site.core.read_node(machine).status.conditions or []
    return not any(one.type == "Ready" and one.status == "True" for one in conditions)


def _pod(name: str, machine: str, uid: str) -> Object:
    return {
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "nodeName": machine,
            "hostPID": True,
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": "crash",
                    "image": IMAGE,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python3", "-c", SCRIPT, "kubelet", uid, str(SILENT_SECONDS)],
                    "securityContext": {"privileged": True, "runAsUser": 0},
                }
            ],
        },
    }
