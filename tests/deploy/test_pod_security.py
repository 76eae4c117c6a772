"""Every pod of ours passes the *restricted* standard, and the checker would notice if one did not."""

import copy

import pytest

from tests.deploy.conftest import OVERLAYS, by_hand, containers, objects, pods
from tests.deploy.pod_security import violations


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_of_an_overlay_passes(overlay):
    made = list(pods(objects(overlay)))
    assert len(made) >= 3
    assert {name: broken for name, metadata, spec in made if (broken := violations(metadata, spec))} == {}


def test_the_pod_that_restores_passes():
    ((_name, metadata, spec),) = pods(by_hand())
    assert violations(metadata, spec) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_root_file_systems_are_read_only_and_tokens_are_given_by_name(overlay):
    for name, _metadata, spec in pods(objects(overlay)):
        assert isinstance(spec.get("automountServiceAccountToken"), bool), name
        assert spec["enableServiceLinks"] is False, name
        for container in containers(spec):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, (name, container["name"])
            assert container["resources"]["requests"]["cpu"]
            assert container["resources"]["limits"]["memory"]


GOOD = {
    "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [
        {"name": "a", "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
    ],
    "volumes": [{"name": "tmp", "emptyDir": {}}],
}
FIRST = ("containers", 0)
CONTEXT = (*FIRST, "securityContext")
GONE = object()
MUTANTS = {
    "hostNetwork": (("hostNetwork",), True),
    "hostPID": (("hostPID",), True),
    "hostIPC": (("hostIPC",), True),
    "privileged": ((*CONTEXT, "privileged"), True),
    "escalation allowed": ((*CONTEXT, "allowPrivilegeEscalation"), True),
    "escalation not said": ((*CONTEXT, "allowPrivilegeEscalation"), GONE),
    "capabilities kept": ((*CONTEXT, "capabilities"), GONE),
    "not all dropped": ((*CONTEXT, "capabilities", "drop"), ["NET_RAW"]),
    "capability added": ((*CONTEXT, "capabilities", "add"), ["SYS_ADMIN"]),
    "root allowed": (("securityContext", "runAsNonRoot"), GONE),
    "root allowed by the container": ((*CONTEXT, "runAsNonRoot"), False),
    "root": (("securityContext", "runAsUser"), 0),
    "root in the container": ((*CONTEXT, "runAsUser"), 0),
    "no seccomp": (("securityContext", "seccompProfile"), GONE),
    "seccomp off": (("securityContext", "seccompProfile", "type"), "Unconfined"),
    "seccomp off in the container": ((*CONTEXT, "seccompProfile"), {"type": "Unconfined"}),
    "host path": (("volumes", 0), {"name": "tmp", "hostPath": {"path": "/"}}),
    "nfs in the pod": (("volumes", 0), {"name": "tmp", "nfs": {"server": "a", "path": "/"}}),
    "host port": ((*FIRST, "ports"), [{"containerPort": 1, "hostPort": 1}]),
    "unmasked proc": ((*CONTEXT, "procMount"), "Unmasked"),
    "sysctl": (("securityContext", "sysctls"), [{"name": "kernel.msgmax", "value": "1"}]),
    "selinux type": (("securityContext", "seLinuxOptions"), {"type": "spc_t"}),
    "selinux user": ((*CONTEXT, "seLinuxOptions"), {"user": "system_u"}),
    "apparmor": ((*CONTEXT, "appArmorProfile"), {"type": "Unconfined"}),
    "windows host process": (("securityContext", "windowsOptions"), {"hostProcess": True}),
    "probe of another host": ((*FIRST, "livenessProbe"), {"httpGet": {"host": "10.0.0.1", "port": 80}}),
    "hook to another host": ((*FIRST, "lifecycle"), {"preStop": {"httpGet": {"host": "10.0.0.1", "port": 80}}}),
    "init container": (("initContainers",), [{"name": "i"}]),
    "ephemeral container": (("ephemeralContainers",), [{"name": "e"}]),
}


def mutated(path, value):
    spec = copy.deepcopy(GOOD)
    place = spec
    for step in path[:-1]:
        place = place[step]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return spec


def test_a_good_pod_passes():
    assert violations({}, GOOD) == []
    assert violations({}, mutated((*CONTEXT, "capabilities", "add"), ["NET_BIND_SERVICE"])) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bad_pod_does_not(name):
    assert violations({}, mutated(*MUTANTS[name]))


def test_an_apparmor_annotation_counts():
    key = "container.apparmor.security.beta.kubernetes.io/a"
    assert violations({"annotations": {key: "unconfined"}}, GOOD)
    assert violations({"annotations": {key: "runtime/default"}}, GOOD) == []
