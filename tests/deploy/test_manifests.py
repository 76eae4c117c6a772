"""What the overlays render is valid, and every name in it leads to something."""

import json
import re

import kubernetes_validate
import pytest
from django.conf import settings
from django.core.management import get_commands

from console import supervision
from console.management.commands.serve import Command as Serve
from runtime.backends.kubernetes_access import rbac
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_names import MANAGED_BY, MANAGER, namespace_of
from runtime.backends.manifests import organization_objects
from runtime.specs import Framework, Image, Resources, RunSpec
from tests.deploy.conftest import KUBERNETES, OVERLAYS, by_hand, containers, env_file, objects, pods

MINORS = ("1.34", "1.35", "1.36", "1.37")
OURS = re.compile(r"(trainyard/console|console:)")


@pytest.fixture(params=OVERLAYS)
def overlay(request):
    return request.param


def of_kind(manifests, kind):
    return [one for one in manifests if one["kind"] == kind]


def selects(selector, labels):
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or selector or {}).items())


def namespace(one):
    return one["metadata"].get("namespace")


@pytest.mark.parametrize("minor", MINORS)
def test_every_object_is_valid(overlay, minor):
    for one in [*objects(overlay), *by_hand()]:
        kubernetes_validate.validate(one, minor, strict=True)


def test_the_validator_would_notice(overlay):
    (web,) = [
        one for one in objects(overlay) if one["metadata"]["name"] == "trainyard-web" and "template" in one["spec"]
    ]
    broken = json.loads(json.dumps(web))
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, MINORS[-1], strict=True)


def test_every_program_of_the_console_runs_once(overlay):
    told = [
        container["args"][1]
        for _name, _metadata, spec in pods(objects(overlay))
        for container in spec["containers"]
        if container.get("args", [""])[0] == "serve"
    ]
    wanted = {program.name for program in supervision.programs()} - {"services"}
    assert sorted(told) == sorted(wanted if overlay == "trial" else wanted - {"sandbox"})


def test_every_command_exists():
    for manifests in (*map(objects, OVERLAYS), by_hand()):
        for name, _metadata, spec in pods(manifests):
            for container in containers(spec):
                if OURS.search(container["image"]):
                    words = container.get("args") or container["command"]
                    found = re.findall(r"manage\.py (\w+)", " ".join(words)) or [words[0]]
                    assert set(found) <= set(get_commands()), name
    assert Serve().help


def test_a_pod_uses_what_is_there(overlay):
    manifests = objects(overlay)
    claims = {(namespace(one), one["metadata"]["name"]) for one in of_kind(manifests, "PersistentVolumeClaim")}
    maps = {one["metadata"]["name"] for one in of_kind(manifests, "ConfigMap")}
    accounts = {one["metadata"]["name"] for one in of_kind(manifests, "ServiceAccount")} | {"default"}
    classes = {one["metadata"]["name"] for one in of_kind(manifests, "PriorityClass")} | {None}
    for name, _metadata, spec in pods(manifests):
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        for one in of_kind(manifests, "StatefulSet"):
            if name == f"StatefulSet/{one['metadata']['name']}":
                volumes |= {claim["metadata"]["name"]: {} for claim in one["spec"]["volumeClaimTemplates"]}
        wanted = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        }
        assert {("trainyard", claim) for claim in wanted} <= claims, name
        assert spec.get("serviceAccountName", "default") in accounts, name
        assert spec.get("priorityClassName") in classes, name
        used = set()
        for container in containers(spec):
            mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
            assert mounts <= set(volumes), (name, container["name"])
            used |= mounts
            for source in container.get("envFrom", ()):
                told = source.get("configMapRef") or source["secretRef"]
                assert told["name"] in maps | {"trainyard-secrets"}, name
        assert used == set(volumes), name


def test_selectors_find_their_pods(overlay):
    manifests = objects(overlay)
    made = {name: metadata["labels"] for name, metadata, _spec in pods(manifests)}
    for one in manifests:
        name = f"{one['kind']}/{one['metadata']['name']}"
        if one["kind"] in {"Deployment", "StatefulSet"}:
            assert selects(one["spec"]["selector"], made[name]), name
            others = [other for other, labels in made.items() if selects(one["spec"]["selector"], labels)]
            assert others == [name]
        elif one["kind"] in {"Service", "PodDisruptionBudget"}:
            assert any(selects(one["spec"]["selector"], labels) for labels in made.values()), name
        elif one["kind"] == "HorizontalPodAutoscaler":
            target = one["spec"]["scaleTargetRef"]
            assert f"{target['kind']}/{target['name']}" in made
            (scaled,) = [
                other for other in of_kind(manifests, target["kind"]) if other["metadata"]["name"] == target["name"]
            ]
            assert "replicas" not in scaled["spec"], "whoever applies it again would undo what the autoscaler did"


def test_services_and_the_ingress_reach_a_port(overlay):
    manifests = objects(overlay)
    services = {one["metadata"]["name"]: one for one in of_kind(manifests, "Service")}
    for name, service in services.items():
        ports = {
            port.get("name")
            for _pod, metadata, spec in pods(manifests)
            if selects(service["spec"]["selector"], metadata["labels"])
            for container in spec["containers"]
            for port in container.get("ports", ())
        }
        for port in service["spec"]["ports"]:
            assert port.get("targetPort", port["name"]) in ports, name
    for ingress in of_kind(manifests, "Ingress"):
        assert ingress["spec"]["tls"][0]["hosts"] == [rule["host"] for rule in ingress["spec"]["rules"]]
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                service = services[path["backend"]["service"]["name"]]
                assert path["backend"]["service"]["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}


def test_probes_ask_as_a_host_that_the_console_answers(overlay):
    seen = 0
    for name, _metadata, spec in pods(objects(overlay)):
        for container in containers(spec):
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                asked = container.get(kind, {}).get("httpGet")
                if asked:
                    seen += 1
                    assert asked["path"] in {"/healthz", "/readyz"}
                    hosts = [header["value"] for header in asked["httpHeaders"] if header["name"] == "Host"]
                    assert set(hosts) & {"localhost", "127.0.0.1"}, name
    assert seen == 3
    assert "localhost" in settings.ALLOWED_HOSTS


def test_pulses_are_those_that_processes_show(overlay):
    asked = {}
    for _name, _metadata, spec in pods(objects(overlay)):
        for container in spec["containers"]:
            words = " ".join(container.get("livenessProbe", {}).get("exec", {}).get("command", ()))
            if found := re.search(r"pulse/(\w+)", words):
                asked[container["name"]] = found[1]
    assert asked == {"worker": "worker", "beat": "beat", "watcher": "watcher"}


def test_one_beat_and_one_watcher_and_never_two_at_an_upgrade():
    for one in of_kind(objects("production"), "Deployment"):
        single = one["metadata"]["name"] in {"trainyard-beat", "trainyard-watcher"}
        assert one["spec"].get("replicas") == (1 if single else None)
        assert one["spec"]["strategy"]["type"] == ("Recreate" if single else "RollingUpdate")
        if not single:
            assert one["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_nothing_is_open_that_no_policy_opens(overlay):
    manifests = objects(overlay)
    policies = of_kind(manifests, "NetworkPolicy")
    closed = [
        one for one in policies if one["spec"]["podSelector"] == {} and not {"ingress", "egress"} & set(one["spec"])
    ]
    assert {namespace(one) for one in closed if set(one["spec"]["policyTypes"]) == {"Ingress", "Egress"}} == {
        "trainyard"
    }
    for policy in policies:
        for rule in policy["spec"].get("ingress", ()):
            assert rule.get("from"), "an ingress rule without `from` lets everybody in"
            assert rule.get("ports")
        for rule in policy["spec"].get("egress", ()):
            assert rule.get("ports"), "an egress rule without ports lets everything out"


def test_a_run_gets_nothing_of_what_is_open_to_the_console(overlay):
    run = {MANAGED_BY: MANAGER, "trainyard.dev/run": "job-1-1", "job-name": "job-1-1"}
    found = [one for one in of_kind(objects(overlay), "NetworkPolicy") if selects(one["spec"]["podSelector"], run)]
    assert any(one["metadata"]["name"] == "trainyard-runs-default-deny" for one in found)
    for policy in found:
        assert not policy["spec"].get("ingress")
        assert not policy["spec"].get("egress")


def test_namespaces_enforce_the_restricted_standard(overlay):
    made = of_kind(objects(overlay), "Namespace")
    assert {one["metadata"]["name"] for one in made} == {namespace(one) for one in objects(overlay)} - {None}
    for one in made:
        assert one["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_clusters_setting_fits_what_is_applied(overlay):
    manifests = objects(overlay)
    told = {key: value for one in of_kind(manifests, "ConfigMap") for key, value in one["data"].items()}
    for name, data in json.loads(told["TRAINYARD_CLUSTERS"]).items():
        config = ClusterConfig.from_data(name, data)
        assert config.in_cluster
        claims = {(namespace(one), one["metadata"]["name"]) for one in of_kind(manifests, "PersistentVolumeClaim")}
        assert (config.namespace, config.volume.claim) in claims
        assert config.priority_class in {one["metadata"]["name"] for one in of_kind(manifests, "PriorityClass")}
        assert config.volume.root == "/srv/trainyard"
        for root in ("TRAINYARD_STORAGE_ROOT", "TRAINYARD_RUNS_ROOT"):
            assert told[root].startswith(config.volume.root + "/")
        for _pod, _metadata, spec in pods(manifests):
            for container in containers(spec):
                for mount in container.get("volumeMounts", ()):
                    if mount["name"] == "data" and OURS.search(container["image"]) and "subPath" not in mount:
                        assert mount["mountPath"] == config.volume.root
                        assert config.uid == spec["securityContext"]["runAsUser"]


@pytest.mark.parametrize(("name", "sides"), [("production", 2), ("organizations", 3)])
def test_all_sides_of_the_share_are_one_share(name, sides):
    manifests = objects(name)
    volumes = of_kind(manifests, "PersistentVolume")
    assert len(volumes) == sides
    for each in volumes:
        assert all(each["spec"][key] == volumes[0]["spec"][key] for key in ("nfs", "accessModes", "mountOptions"))
    claims = {(namespace(one), one["spec"].get("volumeName")) for one in of_kind(manifests, "PersistentVolumeClaim")}
    for volume in volumes:
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        assert (volume["spec"]["claimRef"]["namespace"], volume["metadata"]["name"]) in claims


def test_the_restoring_pod_sees_what_the_backing_up_one_sees():
    by_name = {name: spec for name, _metadata, spec in pods(objects("production"))}
    backup = by_name["CronJob/trainyard-backup"]
    ((_name, _metadata, restore),) = pods(by_hand())
    assert {volume["name"] for volume in backup["volumes"]} == {volume["name"] for volume in restore["volumes"]}
    told = {one["name"]: one["value"] for one in restore["containers"][0]["env"]}
    base = env_file(KUBERNETES / "base" / "settings.env")
    assert told == {name: base[name] for name in told}
    assert len(told) == 3


def test_the_console_may_do_what_kubernetes_rbac_prints_and_no_more(overlay):
    manifests = objects(overlay)
    told = {key: value for one in of_kind(manifests, "ConfigMap") for key, value in one["data"].items()}
    wanted = [
        one
        for name, data in json.loads(told["TRAINYARD_CLUSTERS"]).items()
        for one in rbac(ClusterConfig.from_data(name, data))
        if one["kind"] != "ServiceAccount"
    ]
    found = [one for one in manifests if one["apiVersion"].startswith("rbac.authorization.k8s.io/")]
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert by_name == {(one["kind"], one["metadata"]["name"]): one for one in wanted}
    (account,) = of_kind(manifests, "ServiceAccount")
    subjects = [subject for one in found for subject in one.get("subjects", ())]
    assert {(subject["name"], subject["namespace"]) for subject in subjects} == {
        (account["metadata"]["name"], namespace(account))
    }


def test_an_organizations_namespace_is_the_one_that_the_console_makes():
    """What is applied beforehand takes nothing away, and the console's own objects change none of it."""
    manifests = objects("organizations")
    (data,) = (one["data"] for one in of_kind(manifests, "ConfigMap"))
    config = ClusterConfig.from_data("default", json.loads(data["TRAINYARD_CLUSTERS"])["default"])
    assert config.namespace_per_organization
    where = namespace_of(config, "acme")
    claims = {(namespace(one), one["metadata"]["name"]) for one in of_kind(manifests, "PersistentVolumeClaim")}
    assert (where, config.volume.claim) in claims
    applied = next(one for one in of_kind(manifests, "Namespace") if one["metadata"]["name"] == where)
    run = RunSpec(
        name="job-1-1",
        framework=Framework.PYTORCH,
        image=Image(builtin="pytorch"),
        nodes=1,
        workers_per_node=1,
        resources=Resources(1, 1024),
        script="train.py",
        deadline_seconds=60,
        labels={"organization": "acme"},
        organization_nodes=4,
    )
    made = organization_objects(run, config)
    assert {one["kind"] for one in made} >= {"Namespace", "LimitRange", "ResourceQuota", "NetworkPolicy"}
    labels = made[0]["metadata"]["labels"]
    assert made[0]["metadata"]["name"] == where
    assert {key: applied["metadata"]["labels"].get(key, value) for key, value in labels.items()} == labels
    here = {(one["kind"], one["metadata"]["name"]) for one in manifests if namespace(one) == where}
    assert not here & {(one["kind"], one["metadata"]["name"]) for one in made}
