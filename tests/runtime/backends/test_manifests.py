import base64
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from runtime.backends import kubernetes_access, manifests
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_names import host, labels, namespace_of
from runtime.backends.kubernetes_order import order
from runtime.errors import InvalidSpec
from runtime.specs import Framework, Image, Mount, PullSecret, Resources, RunSpec
from tests.kubernetes.podsecurity import violations

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ("1.35", "1.36", "1.37")
ROOT = Path("/srv/trainyard/runs/east")
UID = "6f1c9f8e-0000-4000-8000-000000000001"
KEYS = {"token": "t" * 64, "record_key": "r" * 64}


def config(**changes: Any) -> ClusterConfig:
    data = {
        "volume": {"claim": "trainyard", "root": "/srv/trainyard"},
        "images": {"pytorch": "registry.example.com/trainyard/pytorch:1"},
    }
    return ClusterConfig.from_data("east", {**data, **changes})


def spec(**changes: Any) -> RunSpec:
    given = RunSpec(
        name="job-7-1",
        framework=Framework.PYTORCH,
        image=Image(builtin="pytorch"),
        nodes=2,
        workers_per_node=2,
        resources=Resources(cpus=1.5, memory_mib=2048, disk_mib=4096),
        script="train.py",
        deadline_seconds=3600,
        arguments=("--fast",),
        datasets=("mnist",),
        mounts=(
            Mount("/srv/trainyard/workspaces/3", "/workspace", read_only=False),
            Mount("/srv/trainyard/datasets/9/2", "/datasets/mnist"),
        ),
        checkpoint_key="job-7",
        labels={"organization": "acme", "job": "7"},
        node_kind="cpu-small",
    )
    return dataclasses.replace(given, **changes)


def everything(told: RunSpec, on: ClusterConfig) -> list[dict[str, Any]]:
    made = order(told, on, ROOT)
    launcher = manifests.launcher("trainyard-runs", b"PK-an-archive")
    job = manifests.job(told, on, made, launcher["metadata"]["name"])
    return [launcher, job, *manifests.owned(told, on, made, UID, KEYS)]


def of_kind(kind: str, objects: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [one for one in objects if one["kind"] == kind]
    return found


def pod_of(told: RunSpec, on: ClusterConfig) -> dict[str, Any]:
    return of_kind("Job", everything(told, on))["spec"]["template"]["spec"]


GPU = {
    "namespace": "gpu-runs",
    "queue": "training",
    "priority_class": "batch",
    "namespace_per_organization": True,
    "pythons": {"registry.acme.example/vision:3": "/opt/conda/bin/python"},
    "node_selectors": {"gpu-large": {"pool": "gpu"}},
    "tolerations": {"gpu-large": [{"key": "pool", "value": "gpu", "effect": "NoSchedule"}]},
    "spread": "spread",
    "topology_key": "topology.kubernetes.io/zone",
    "image_pull_secrets": ["mirror"],
}


def gpu_run() -> RunSpec:
    return spec(
        framework=Framework.TENSORFLOW,
        image=Image(reference="registry.acme.example/vision:3"),
        resources=Resources(cpus=8, memory_mib=65536, gpus=4, gpu_type="NVIDIA A100-SXM4-80GB"),
        node_kind="gpu-large",
        organization_nodes=6,
        pull_secret=PullSecret("registry.acme.example", "acme", "hunter2"),
        datasets=(),
        mounts=(Mount("/srv/trainyard/workspaces/3", "/workspace", read_only=False),),
    )


def whole(name: str) -> list[dict[str, Any]]:
    match name:
        case "cpu":
            return everything(spec(), config())
        case "gpu":
            on = config(**GPU)
            return [*manifests.organization_objects(gpu_run(), on), *everything(gpu_run(), on)]
        case "elastic":
            return everything(spec(framework=Framework.HOROVOD, min_nodes=1, checkpoint_key=""), config())
        case "trial":
            on = config(volume={"host_path": "/data", "root": "/srv/trainyard", "shared": False})
            return everything(spec(nodes=1), on)
        case "rbac":
            return kubernetes_access.rbac(config())
        case "rbac-organizations":
            return kubernetes_access.rbac(config(**GPU), service_account="console", service_account_namespace="yard")
    raise AssertionError(name)


NAMES = ("cpu", "gpu", "elastic", "trial", "rbac", "rbac-organizations")


@pytest.mark.parametrize("name", NAMES)
def test_every_manifest_is_the_golden_one(name: str) -> None:
    """After a change that is meant: TRAINYARD_GOLDEN=write pytest, and read the difference."""
    path = GOLDEN / f"{name}.json"
    made = json.dumps(whole(name), indent=2, sort_keys=True) + "\n"
    if os.environ.get("TRAINYARD_GOLDEN") == "write":
        path.write_text(made)
    assert made == path.read_text()


def each() -> Iterator[Any]:
    for name in NAMES:
        for one in whole(name):
            yield pytest.param(one, id=f"{name}-{one['kind']}-{one['metadata']['name']}")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", list(each()))
def test_every_manifest_fits_the_published_schemas(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    wrong = everything(spec(), config())[1]
    wrong["spec"]["completion"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.36", strict=True)


@pytest.mark.parametrize("name", ["cpu", "gpu", "elastic"])
def test_pods_meet_the_restricted_standard(name: str) -> None:
    assert violations(of_kind("Job", whole(name))["spec"]["template"]["spec"], "restricted") == []


def test_a_folder_of_the_machine_is_all_that_a_trial_breaks_of_the_standard() -> None:
    broken = violations(of_kind("Job", whole("trial"))["spec"]["template"]["spec"], "restricted")
    assert len(broken) == 1
    assert "hostPath" in broken[0]


def test_a_job_is_made_suspended_and_never_tries_again_by_itself() -> None:
    job = of_kind("Job", whole("cpu"))["spec"]
    assert (job["suspend"], job["backoffLimit"], job["completions"], job["parallelism"]) == (True, 0, 2, 2)
    assert job["podFailurePolicy"]["rules"][0]["action"] == "FailJob"


def test_nodes_of_an_elastic_run_fail_each_for_itself() -> None:
    job = of_kind("Job", whole("elastic"))["spec"]
    assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (0, 1)
    assert "backoffLimit" not in job
    assert "podFailurePolicy" not in job


def test_everything_else_belongs_to_the_job_and_carries_its_labels() -> None:
    for one in everything(spec(), config())[2:]:
        assert one["metadata"]["ownerReferences"] == [
            {"apiVersion": "batch/v1", "kind": "Job", "name": "job-7-1", "uid": UID}
        ]
        assert one["metadata"]["labels"] == labels(spec())
        assert one["metadata"]["name"] == "job-7-1"


def test_requests_are_limits_but_for_the_disk() -> None:
    resources = pod_of(spec(), config())["containers"][0]["resources"]
    assert resources["limits"] == {"cpu": "1500m", "memory": "2048Mi", "ephemeral-storage": "4096Mi"}
    assert resources["requests"] == {"cpu": "1500m", "memory": "2048Mi", "ephemeral-storage": "256Mi"}


def test_part_of_a_thousandth_of_a_core_is_rounded_up() -> None:
    told = spec(resources=Resources(cpus=0.1005, memory_mib=64))
    assert pod_of(told, config())["containers"][0]["resources"]["limits"]["cpu"] == "101m"


def test_a_type_of_gpu_is_asked_for_by_the_nodes_label() -> None:
    pod = pod_of(gpu_run(), config(**GPU))
    assert pod["nodeSelector"] == {"pool": "gpu", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_any_gpu_will_do_where_no_type_is_named() -> None:
    told = spec(resources=Resources(cpus=1, memory_mib=64, gpus=1))
    assert "nodeSelector" not in pod_of(told, config())


def test_what_is_set_for_no_kind_counts_for_all_that_are_not_named() -> None:
    on = config(node_selectors={"": {"pool": "any"}, "gpu-large": {"pool": "gpu"}})
    assert pod_of(spec(), on)["nodeSelector"] == {"pool": "any"}
    assert pod_of(spec(node_kind="gpu-large"), on)["nodeSelector"] == {"pool": "gpu"}


def test_pods_are_packed_or_spread_unless_there_is_one() -> None:
    assert "podAffinity" in pod_of(spec(), config())["affinity"]
    assert "topologySpreadConstraints" in pod_of(spec(), config(spread="spread"))
    alone = pod_of(spec(nodes=1), config(spread="spread"))
    assert "topologySpreadConstraints" not in alone
    assert "affinity" not in alone


def test_customers_folders_are_parts_of_the_volume_and_datasets_read_only() -> None:
    mounts = {one["mountPath"]: one for one in pod_of(spec(), config())["containers"][0]["volumeMounts"]}
    assert mounts["/workspace"] == {"name": "storage", "mountPath": "/workspace", "subPath": "workspaces/3"}
    assert mounts["/datasets/mnist"]["readOnly"] is True
    assert mounts["/trainyard/checkpoints"]["subPath"] == "runs/east/.checkpoints/job-7"
    assert mounts["/trainyard/run"]["subPath"] == "runs/east/job-7-1/run"


def test_a_run_without_a_key_has_checkpoints_of_its_own() -> None:
    mounts = {
        one["mountPath"]: one for one in pod_of(spec(checkpoint_key=""), config())["containers"][0]["volumeMounts"]
    }
    assert mounts["/trainyard/checkpoints"]["subPath"] == "runs/east/job-7-1/checkpoints"


@pytest.mark.parametrize(
    "source",
    ["/etc", "/srv/trainyard", "/srv/trainyard/", "/srv/trainyard-other/x", "/srv/trainyard/../etc", "relative"],
)
def test_what_lies_outside_the_volume_cannot_be_mounted(source: str) -> None:
    told = spec(mounts=(Mount(source, "/workspace", read_only=False),))
    with pytest.raises(InvalidSpec) as caught:
        everything(told, config())
    assert caught.value.field == "mounts"


def test_a_target_that_kubernetes_cannot_mount_is_refused() -> None:
    told = spec(mounts=(Mount("/srv/trainyard/d", "/datasets/a:b"),))
    with pytest.raises(InvalidSpec):
        everything(told, config())


def test_an_image_that_the_cluster_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidSpec) as caught:
        everything(spec(image=Image(builtin="horovod")), config())
    assert caught.value.field == "image"


def test_no_secret_is_in_anything_but_secrets() -> None:
    made = [one for one in everything(gpu_run(), config(**GPU)) if one["kind"] != "Secret"]
    text = json.dumps(made) + repr(gpu_run()) + gpu_run().to_json()
    for secret in ("hunter2", base64.b64encode(b"acme:hunter2").decode(), KEYS["token"], KEYS["record_key"]):
        assert secret not in text


def test_the_pull_secret_says_who_we_are_at_its_registry() -> None:
    made = everything(gpu_run(), config(**GPU))
    (pull,) = [one for one in made if one.get("type") == "kubernetes.io/dockerconfigjson"]
    told = json.loads(base64.b64decode(pull["data"][".dockerconfigjson"]))
    assert told["auths"]["registry.acme.example"]["password"] == "hunter2"
    assert pull["metadata"]["name"] == "job-7-1-pull"
    names = [one["name"] for one in pod_of(gpu_run(), config(**GPU))["imagePullSecrets"]]
    assert names == ["mirror", "job-7-1-pull"]


def test_docker_hub_goes_by_its_old_address() -> None:
    told = dataclasses.replace(gpu_run(), pull_secret=PullSecret("docker.io", "acme", "x"))
    (pull,) = [one for one in everything(told, config(**GPU)) if one.get("type") == "kubernetes.io/dockerconfigjson"]
    assert list(json.loads(base64.b64decode(pull["data"][".dockerconfigjson"]))["auths"]) == [
        "https://index.docker.io/v1/"
    ]


def test_the_launcher_is_named_by_its_content() -> None:
    one, same, other = (manifests.launcher("n", data)["metadata"]["name"] for data in (b"a", b"a", b"b"))
    assert one == same != other


def test_pods_of_a_run_reach_each_other_and_names_and_nothing_else() -> None:
    policy = of_kind("NetworkPolicy", whole("cpu"))["spec"]
    own = {"podSelector": {"matchLabels": {"trainyard.dev/run": "job-7-1"}}}
    assert policy["ingress"] == [{"from": [own]}]
    assert policy["egress"][0] == {"to": [own]}
    assert {port["port"] for port in policy["egress"][1]["ports"]} == {53}
    assert len(policy["egress"]) == 2


def test_an_organizations_namespace_is_its_own_whatever_it_is_called() -> None:
    on = config(namespace_per_organization=True)
    names = [namespace_of(on, slug) for slug in ("acme", "Acme", "acme!", "a" * 60, "a" * 61, "ac-me")]
    assert len(set(names)) == len(names)
    assert names[0] == "trainyard-runs-acme"
    assert all(len(name) <= 63 for name in names)
    assert namespace_of(config(), "acme") == "trainyard-runs"


def test_an_organizations_quota_is_its_nodes() -> None:
    quota = of_kind("ResourceQuota", manifests.organization_objects(gpu_run(), config(**GPU)))
    assert quota["spec"]["hard"] == {"pods": "6"}


def test_names_that_are_no_label_are_left_out() -> None:
    assert "trainyard.dev/organization" not in labels(spec(labels={"organization": "not a label!"}))


def test_the_order_names_every_pod_and_carries_no_secret() -> None:
    told = json.loads(of_kind("ConfigMap", everything(spec(), config())[1:])["data"]["order.json"])
    assert told["names"] == ["job-7-1-0.job-7-1", "job-7-1-1.job-7-1"] == [host("job-7-1", node) for node in (0, 1)]
    assert "sources" not in told
    assert told["written"]["workspace"] == "/workspace"
    assert (told["deadline_seconds"], told["plan"]["workers"]) == (3600, 2)


def test_the_order_is_the_same_whenever_it_is_made() -> None:
    assert order(gpu_run(), config(**GPU), ROOT) == order(gpu_run(), config(**GPU), ROOT)


def test_tensorflows_ranks_have_a_port_each_and_elastic_runs_spare_ones() -> None:
    plan = order(gpu_run(), config(**GPU), ROOT)["plan"]
    assert len(set(plan["worker_ports"])) == 4
    elastic = order(spec(min_nodes=1), config(), ROOT)["plan"]
    ports = [elastic["master_port"], *elastic["worker_ports"], *elastic["spare_ports"]]
    assert len(ports) == len(set(ports)) == 2


def test_pods_end_their_run_before_the_cluster_ends_them() -> None:
    pod = pod_of(spec(grace_seconds=10), config())
    assert pod["terminationGracePeriodSeconds"] > 10
    longest = config().gang_seconds + config().start_seconds + 3600
    assert pod["activeDeadlineSeconds"] > longest


def test_the_roles_name_no_wildcard_and_no_more_than_is_used() -> None:
    rules = [rule for one in kubernetes_access.rbac(config()) for rule in one.get("rules", [])]
    assert not any("*" in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]] for rule in rules)
    (role,) = [one for one in kubernetes_access.rbac(config()) if one["kind"] == "Role"]
    secrets = next(rule for rule in role["rules"] if rule["resources"] == ["secrets"])
    assert "list" not in secrets["verbs"]


def test_one_namespace_an_organization_asks_for_them_all() -> None:
    made = kubernetes_access.rbac(config(**GPU))
    assert {one["kind"] for one in made} == {"ServiceAccount", "ClusterRole", "ClusterRoleBinding"}
