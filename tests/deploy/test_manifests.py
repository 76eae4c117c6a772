"""The rendered overlays are valid and restricted, and every object that they name exists."""

import json
import re
import socket
import subprocess
import sys

import pytest
from django.conf import settings
from django.core.management import get_commands

from console.supervision import supervisor
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.manifests import organization_objects
from runtime.backends.kubernetes.names import MANAGED_BY_LABEL, MANAGER, organization_namespace
from runtime.backends.kubernetes.rbac import rbac
from runtime.specs import Framework, Image, Resources, RunSpec
from tests.deploy.conftest import KUBERNETES, OVERLAYS, containers, env_file, manifests_applied_by_hand, objects, pods
from tests.kubernetes import schemas

CONSOLE_IMAGE = re.compile(r"(trainyard/console|console:)")
"""Matches the console's image, not those of PostgreSQL and others."""
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
POD_FIELDS = {
    "automountServiceAccountToken", "containers", "enableServiceLinks", "initContainers", "priorityClassName",
    "restartPolicy", "securityContext", "serviceAccountName", "terminationGracePeriodSeconds",
    "topologySpreadConstraints", "volumes",
}  # fmt: skip
"""Fields that a pod's spec may set. Everything else, such as hostNetwork, needs a reason."""
POD_SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


@pytest.fixture(params=OVERLAYS)
def overlay(request):
    return request.param


def of_kind(manifests, kind):
    return [each for each in manifests if each["kind"] == kind]


def name_of(each):
    return each["metadata"]["name"]


def names(manifests, kind):
    return {name_of(each) for each in of_kind(manifests, kind)}


def namespace(each):
    return each["metadata"].get("namespace")


def claims_of(manifests):
    return {(namespace(each), name_of(each)) for each in of_kind(manifests, "PersistentVolumeClaim")}


def variables_of(manifests):
    return {key: value for each in of_kind(manifests, "ConfigMap") for key, value in each["data"].items()}


def clusters_of(manifests):
    clusters = json.loads(variables_of(manifests)["TRAINYARD_CLUSTERS"])
    return [ClusterConfig.from_data(name, data) for name, data in clusters.items()]


def containers_of(manifests):
    return [(name, container) for name, _metadata, spec in pods(manifests) for container in containers(spec)]


def selects(selector, labels):
    # A Service's selector has the labels themselves, other selectors have them in `matchLabels`.
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or selector or {}).items())


@pytest.mark.parametrize("minor", ["1.34", "1.37"], ids="Kubernetes {}".format)
def test_every_object_is_valid(overlay, minor):
    for each in [*objects(overlay), *manifests_applied_by_hand()]:
        schemas.validate(each, minor)


def test_every_pod_meets_the_restricted_pod_security_standard(overlay):
    manifests = [*objects(overlay), *manifests_applied_by_hand()]
    for name, metadata, spec in pods(manifests):
        assert set(spec) <= POD_FIELDS, name
        assert not [key for key in metadata.get("annotations", ()) if "apparmor" in key], name
        assert isinstance(spec["automountServiceAccountToken"], bool), name
        assert spec["enableServiceLinks"] is False, name
        security = dict(spec["securityContext"])
        assert security.pop("runAsUser") > 0, name
        for group in ("runAsGroup", "fsGroup", "fsGroupChangePolicy"):
            security.pop(group, None)
        assert security == POD_SECURITY, name
        kinds = {kind for volume in spec.get("volumes", ()) for kind in volume}
        assert kinds <= {"name", "persistentVolumeClaim", "emptyDir"}, name
    for name, container in containers_of(manifests):
        assert container["securityContext"] == CONTAINER_SECURITY, name
        assert {key for port in container.get("ports", ()) for key in port} <= {"name", "containerPort"}, name
        # The standard forbids probes and hooks of another host.
        assert '"host":' not in json.dumps([container.get(probe) for probe in (*PROBES, "lifecycle")]), name
        assert container["resources"]["requests"]["cpu"], name
        assert container["resources"]["limits"]["memory"], name
    manifests = objects(overlay)
    assert names(manifests, "Namespace") == {namespace(each) for each in manifests} - {None}
    for each in of_kind(manifests, "Namespace"):
        assert each["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_every_program_of_the_console_has_one_container(overlay):
    arguments = [container.get("args", [""]) for _name, container in containers_of(objects(overlay))]
    # `services` are PostgreSQL and Redis, which have other images. `tools` shares a folder of sockets with `web`, so it
    # works only where both are on one machine.
    programs = {program.name for program in supervisor.programs()} - {"services", "tools"}
    expected = programs if overlay == "trial" else programs - {"sandbox"}
    assert sorted(each[1] for each in arguments if each[0] == "serve") == sorted(expected)


def test_every_command_exists_and_every_image_has_one_tag(overlay):
    """Without a tag, an image is `latest`, which is never built. All containers of the console have one version."""
    tags = set()
    for name, container in containers_of([*objects(overlay), *manifests_applied_by_hand()]):
        image = container["image"]
        assert re.search(r"(:[\w.-]+|@sha256:[0-9a-f]{64})$", image), name
        if CONSOLE_IMAGE.search(image):
            tags.add(image.rpartition(":")[2])
            # `args` follow `manage.py`, the entry point of the image. A `command` is a shell script that calls it.
            words = container.get("args") or container["command"]
            assert set(re.findall(r"manage\.py (\w+)", " ".join(words)) or words[:1]) <= set(get_commands()), name
    assert len(tags) == 1


def test_the_tag_of_an_overlay_is_set_in_one_file():
    files = (path for path in KUBERNETES.rglob("kustomization.yaml") if "newTag" in path.read_text())
    assert sorted(path.relative_to(KUBERNETES).as_posix() for path in files) == [
        "overlays/production/console/kustomization.yaml", "overlays/trial/kustomization.yaml",
    ]  # fmt: skip


def test_the_payments_sandbox_is_ready_once_it_listens(monkeypatch):
    (sandbox,) = (each for _name, each in containers_of(objects("trial")) if each["name"] == "sandbox")
    _python, *arguments = sandbox["readinessProbe"]["exec"]["command"]
    probe = lambda: subprocess.run([sys.executable, *arguments], capture_output=True, check=False).returncode
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("SANDBOX_PORT", str(server.getsockname()[1]))
        assert probe() == 0
    assert probe() == 1


def test_a_pod_uses_objects_that_exist(overlay):
    manifests = objects(overlay)
    maps = names(manifests, "ConfigMap") | {"trainyard-secrets"}  # the Secret is in no overlay; operators create it
    templates = {  # volumes whose claims Kubernetes creates for each pod
        f"StatefulSet/{name_of(each)}": {name_of(claim): {} for claim in each["spec"]["volumeClaimTemplates"]}
        for each in of_kind(manifests, "StatefulSet")
    }
    for name, _metadata, spec in pods(manifests):
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())} | templates.get(name, {})
        wanted = [each["persistentVolumeClaim"] for each in volumes.values() if "persistentVolumeClaim" in each]
        assert {("trainyard", claim["claimName"]) for claim in wanted} <= claims_of(manifests), name
        assert spec.get("serviceAccountName", "default") in names(manifests, "ServiceAccount") | {"default"}, name
        assert spec.get("priorityClassName") in names(manifests, "PriorityClass") | {None}, name
        mounts = [mount["name"] for each in containers(spec) for mount in each.get("volumeMounts", ())]
        assert set(mounts) == set(volumes), name
        sources = [source for each in containers(spec) for source in each.get("envFrom", ())]
        assert {(source.get("configMapRef") or source["secretRef"])["name"] for source in sources} <= maps, name


def test_selectors_match_their_pods(overlay):
    manifests = objects(overlay)
    labels_of = {name: metadata["labels"] for name, metadata, _spec in pods(manifests)}
    for each in manifests:
        name = f"{each['kind']}/{name_of(each)}"
        if each["kind"] in {"Deployment", "StatefulSet"}:
            assert [pod for pod, labels in labels_of.items() if selects(each["spec"]["selector"], labels)] == [name]
        elif each["kind"] in {"Service", "PodDisruptionBudget"}:
            assert any(selects(each["spec"]["selector"], labels) for labels in labels_of.values()), name
        elif each["kind"] == "HorizontalPodAutoscaler":
            target = each["spec"]["scaleTargetRef"]
            (scaled,) = (one for one in of_kind(manifests, target["kind"]) if name_of(one) == target["name"])
            assert "replicas" not in scaled["spec"], "applying it again would undo what the autoscaler did"


def test_services_and_the_ingress_reach_a_port(overlay):
    manifests = objects(overlay)
    services = {name_of(each): each["spec"] for each in of_kind(manifests, "Service")}
    for name, service in services.items():
        selected = [
            spec for _pod, metadata, spec in pods(manifests) if selects(service["selector"], metadata["labels"])
        ]
        ports = {port.get("name") for spec in selected for each in spec["containers"] for port in each.get("ports", ())}
        assert {port.get("targetPort", port["name"]) for port in service["ports"]} <= ports, name
    for ingress in of_kind(manifests, "Ingress"):
        rules = ingress["spec"]["rules"]
        assert ingress["spec"]["tls"][0]["hosts"] == [rule["host"] for rule in rules]
        for backend in (path["backend"]["service"] for rule in rules for path in rule["http"]["paths"]):
            assert backend["port"]["name"] in {port["name"] for port in services[backend["name"]]["ports"]}


def test_probes_use_a_host_and_a_liveness_file_that_exist(overlay):
    requests, files = [], {}
    for name, container in containers_of(objects(overlay)):
        for probe in (container.get(kind, {}) for kind in PROBES):
            if request := probe.get("httpGet"):
                requests.append(request["path"])
                hosts = {header["value"] for header in request["httpHeaders"] if header["name"] == "Host"}
                assert hosts & {"localhost", "127.0.0.1"}, name
        command = " ".join(container.get("livenessProbe", {}).get("exec", {}).get("command", ()))
        if match := re.search(r"pulse/(\w+)", command):
            files[container["name"]] = match[1]
    assert len(requests) == len(PROBES)  # of the web process
    assert set(requests) <= {"/healthz", "/readyz"}
    assert "localhost" in settings.ALLOWED_HOSTS
    assert files == {name: name for name in ("worker", "dispatcher", "beat", "watcher")}


def test_an_upgrade_never_runs_two_beats_or_watchers_and_always_a_web_process():
    for each in of_kind(objects("production"), "Deployment"):
        strategy = each["spec"]["strategy"]
        if name_of(each) in {"trainyard-beat", "trainyard-watcher"}:
            assert (each["spec"]["replicas"], strategy["type"]) == (1, "Recreate")
        else:
            assert ("replicas" in each["spec"], strategy["type"]) == (False, "RollingUpdate")
            assert strategy["rollingUpdate"]["maxUnavailable"] == 0


def test_network_policies_deny_by_default_and_name_peers_and_ports(overlay):
    policies = of_kind(objects(overlay), "NetworkPolicy")
    # A policy without rules denies all traffic of its pods. With an empty selector these are all of its namespace.
    denying = [each for each in policies if each["spec"].keys() == {"podSelector", "policyTypes"}]
    closed = [each for each in denying if each["spec"]["podSelector"] == {}]
    both_ways = [each for each in closed if len(each["spec"]["policyTypes"]) == 2]  # Ingress and Egress
    assert {namespace(each) for each in both_ways} == {"trainyard"}
    for policy in policies:
        assert all(rule.get("from") and rule.get("ports") for rule in policy["spec"].get("ingress", ()))
        assert all(rule.get("ports") for rule in policy["spec"].get("egress", ()))
    labels_of_run = {MANAGED_BY_LABEL: MANAGER, "trainyard.dev/run": "job-1-1", "job-name": "job-1-1"}
    of_runs = [each for each in policies if selects(each["spec"]["podSelector"], labels_of_run)]
    assert "trainyard-runs-default-deny" in map(name_of, of_runs)
    assert not [each for each in of_runs if each["spec"].get("ingress") or each["spec"].get("egress")]


def test_the_clusters_setting_fits_what_is_applied(overlay):
    manifests = objects(overlay)
    for config in clusters_of(manifests):
        assert config.in_cluster
        assert (config.namespace, config.volume.claim) in claims_of(manifests)
        assert config.priority_class in names(manifests, "PriorityClass")
        assert config.volume.root == "/srv/trainyard"
        for root in ("TRAINYARD_STORAGE_ROOT", "TRAINYARD_RUNS_ROOT"):
            assert variables_of(manifests)[root].startswith(config.volume.root + "/")
        for _name, _metadata, spec in pods(manifests):
            for container in containers(spec):
                for mount in container.get("volumeMounts", ()):
                    if mount["name"] == "data" and CONSOLE_IMAGE.search(container["image"]) and "subPath" not in mount:
                        assert mount["mountPath"] == config.volume.root
                        assert config.uid == spec["securityContext"]["runAsUser"]


# The namespaces of the console and of all runs; then also that of one organization's runs, as an example.
@pytest.mark.parametrize(("name", "namespaces"), [("production", 2), ("organizations", 3)])
def test_the_volumes_of_all_namespaces_are_one_share(name, namespaces):
    manifests = objects(name)
    volumes = of_kind(manifests, "PersistentVolume")
    assert len(volumes) == namespaces
    claims = {(namespace(each), each["spec"].get("volumeName")) for each in of_kind(manifests, "PersistentVolumeClaim")}
    for volume in volumes:
        assert all(volume["spec"][key] == volumes[0]["spec"][key] for key in ("nfs", "accessModes", "mountOptions"))
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        assert (volume["spec"]["claimRef"]["namespace"], name_of(volume)) in claims


def test_the_restoring_pod_has_the_backups_volumes_and_settings():
    backup = next(spec for name, _metadata, spec in pods(objects("production")) if name == "CronJob/trainyard-backup")
    ((_name, _metadata, restore),) = pods(manifests_applied_by_hand())
    assert {volume["name"] for volume in backup["volumes"]} == {volume["name"] for volume in restore["volumes"]}
    variables = {each["name"]: each["value"] for each in restore["containers"][0]["env"]}
    assert len(variables) == 3  # the folders of the console's state, of its storage and of runs
    assert variables.items() <= env_file(KUBERNETES / "base" / "settings.env").items()


def test_the_console_may_do_what_its_clusters_need_and_no_more(overlay):
    manifests = objects(overlay)
    # `rbac` returns a service account too. The overlay has its own, which is compared with the roles' subjects below.
    by_name = lambda roles: {(each["kind"], name_of(each)): each for each in roles if each["kind"] != "ServiceAccount"}
    applied = [each for each in manifests if each["apiVersion"].startswith("rbac.authorization.k8s.io/")]
    assert by_name(applied) == by_name(role for config in clusters_of(manifests) for role in rbac(config))
    (account,) = of_kind(manifests, "ServiceAccount")
    subjects = {(each["name"], each["namespace"]) for role in applied for each in role.get("subjects", ())}
    assert subjects == {(name_of(account), namespace(account))}


def test_an_organizations_namespace_is_compatible_with_the_consoles_objects():
    manifests = objects("organizations")
    (config,) = clusters_of(manifests)
    assert config.namespace_per_organization
    where = organization_namespace(config, "acme")
    assert (where, config.volume.claim) in claims_of(manifests)
    applied = next(each for each in of_kind(manifests, "Namespace") if name_of(each) == where)
    run = RunSpec(
        name="job-1-1", framework=Framework.PYTORCH, image=Image(builtin="pytorch"), nodes=1, workers_per_node=1,
        resources=Resources(1, 1024), script="train.py", deadline_seconds=60, labels={"organization": "acme"},
        organization_nodes=4,
    )  # fmt: skip
    created = organization_objects(run, config)
    assert {each["kind"] for each in created} >= {"Namespace", "LimitRange", "ResourceQuota", "NetworkPolicy"}
    assert name_of(created[0]) == where
    labels = created[0]["metadata"]["labels"]
    # The overlay sets none of these labels to another value.
    assert {key: applied["metadata"]["labels"].get(key, value) for key, value in labels.items()} == labels
    # The console creates the rest, so an object in both would be changed by each in turn.
    applied_objects = {(each["kind"], name_of(each)) for each in manifests if namespace(each) == where}
    assert not applied_objects & {(each["kind"], name_of(each)) for each in created}
