"""The objects of a run on Kubernetes, compared with golden files and with the published schemas."""

import base64
import dataclasses
import itertools
import json
import os
from pathlib import Path

import pytest

from runtime.backends.kubernetes import manifests, rbac
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.names import gpu_label_value, organization_namespace
from runtime.backends.kubernetes.pod_plan import build_pod_inputs
from runtime.errors import InvalidSpec
from runtime.specs import Framework, Image, Mount, PullSecret, Resources, RunSpec
from tests.kubernetes import schemas
from tests.kubernetes.admission import pod_security_violations

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ("1.35", "1.36", "1.37")
"""The versions of Kubernetes whose published schemas the objects must match."""
ROOT = Path("/srv/trainyard/runs/east")
UID = "6f1c9f8e-0000-4000-8000-000000000001"
"""The UID of the run's Job, which owns its other objects."""
KEYS = {"token": "t" * 64, "record_key": "r" * 64}


def config(**changes):
    data = {
        "volume": {"claim": "trainyard", "root": "/srv/trainyard"},
        "images": {"pytorch": "registry.example.com/trainyard/pytorch:1"},
    }
    return ClusterConfig.from_data("east", {**data, **changes})


def spec(**changes):
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
        models=("net",),
        mounts=(
            Mount("/srv/trainyard/workspaces/3", "/workspace", read_only=False),
            Mount("/srv/trainyard/datasets/9/2", "/datasets/mnist"),
            Mount("/srv/trainyard/models/4", "/models/net"),
        ),
        checkpoint_key="job-7",
        labels={"organization": "acme", "job": "7"},
        node_kind="cpu-small",
    )
    return dataclasses.replace(given, **changes)


def everything(run, cluster):
    """Return all objects of a run in the order of their creation."""
    plan = build_pod_inputs(run, cluster, ROOT)
    launcher = manifests.launcher("trainyard-runs", b"PK-an-archive")
    job = manifests.job(run, cluster, plan, launcher["metadata"]["name"])
    return [launcher, job, *manifests.owned_objects(run, cluster, plan, UID, KEYS)]


def of_kind(kind, objects):
    (match,) = [one for one in objects if one["kind"] == kind]
    return match


def pod_of(run, cluster):
    """Return the spec of the run's Pods."""
    return of_kind("Job", everything(run, cluster))["spec"]["template"]["spec"]


# Settings of a cluster with GPUs and a namespace for each organization, and a run there in a customer's own image.
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


def gpu_run():
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


# An index of packages, a run that installs an order's packages from it, and their folder, which other runs import.
INDEX = {"url": "https://pypi.example.com/simple", "networks": ["10.20.0.5/32"]}
INSTALLATION = {"nodes": 1, "script": "", "builtin_script": "install", "name": "packages-7-0123456789ab"}
PACKAGES = f"{ROOT}/.packages/7/{'0' * 64}/site-packages"
# A trial on one machine: a folder of the machine in place of shared storage.
TRIAL = {"host_path": "/data", "root": "/srv/trainyard", "shared": False}
OBJECTS = {
    "cpu": lambda: everything(spec(), config()),
    "gpu": lambda: [
        *manifests.organization_objects(gpu_run(), config(**GPU)),
        *everything(gpu_run(), config(**GPU)),
    ],
    "elastic": lambda: everything(spec(framework=Framework.HOROVOD, min_nodes=1, checkpoint_key=""), config()),
    "trial": lambda: everything(spec(nodes=1), config(volume=TRIAL)),
    "installation": lambda: everything(spec(**INSTALLATION), config(package_index=INDEX)),
    "packages": lambda: everything(spec(packages=PACKAGES), config(package_index=INDEX)),
    "rbac": lambda: rbac.rbac(config()),
    "rbac-organizations": lambda: rbac.rbac(config(**GPU), service_account="console", service_account_namespace="yard"),
}
"""The objects of each golden file."""
VARIANTS = {"elastic", "trial", "installation", "packages"}
"""Golden files that hold only the differences from that of `cpu`."""


def values_by_path(part, path=""):
    """Return every value of nested objects and lists by its path."""
    if isinstance(part, dict | list) and part:
        pairs = part.items() if isinstance(part, dict) else enumerate(part)
        return {key: value for name, inner in pairs for key, value in values_by_path(inner, f"{path}/{name}").items()}
    return {path: part}


def differences(objects, others):
    """Return the values of `objects` that `others` lack or have otherwise, and None for those that only `others` have.

    Objects are compared by their order, since their names differ.
    """
    values, other_values = values_by_path(objects), values_by_path(others)
    missing = dict.fromkeys(other_values.keys() - values.keys())
    return missing | {path: value for path, value in values.items() if other_values.get(path, ...) != value}


def to_json(value, indent=""):
    """Return sorted JSON in which short objects and lists take one line."""
    line = json.dumps(value, sort_keys=True)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= 120:
        return line
    inner = f"{indent}  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {to_json(part, inner)}" for name, part in sorted(value.items())]
    else:
        parts = [to_json(part, inner) for part in value]
    return f"{line[0]}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{line[-1]}"


@pytest.mark.parametrize("name", OBJECTS)
def test_manifests_match_the_golden_files(name):
    """After an intended change, run TRAINYARD_GOLDEN=write pytest and review the difference."""
    path, golden = GOLDEN / f"{name}.json", OBJECTS[name]()
    if name in VARIANTS:
        golden = differences(golden, OBJECTS["cpu"]())
    text = f"{to_json(golden)}\n"
    if os.environ.get("TRAINYARD_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", OBJECTS)
def test_manifests_match_the_published_schemas(name):
    for manifest, version in itertools.product(OBJECTS[name](), VERSIONS):
        schemas.validate(manifest, version)


@pytest.mark.parametrize("name", ["cpu", "gpu", "elastic", "trial"])
def test_pods_meet_the_restricted_standard_but_for_the_host_path_of_a_trial(name):
    violations = pod_security_violations(of_kind("Job", OBJECTS[name]())["spec"]["template"]["spec"], "restricted")
    assert ["hostPath" in each for each in violations] == ([True] if name == "trial" else [])


@pytest.mark.parametrize(
    ("gpu_type", "label"),
    [(" NVIDIA A100 (80GB) ", "NVIDIA-A100-80GB"), (f"{'A' * 62} B", "A" * 62)],
    ids=["other characters", "cut after a space"],
)
def test_the_label_of_a_gpu_type_begins_and_ends_with_a_letter_or_digit(gpu_type, label):
    assert gpu_label_value(gpu_type) == label


def test_settings_of_the_empty_kind_apply_to_unnamed_kinds():
    cluster = config(node_selectors={"": {"pool": "any"}, "gpu-large": {"pool": "gpu"}})
    assert pod_of(spec(), cluster)["nodeSelector"] == {"pool": "any"}
    assert pod_of(spec(node_kind="gpu-large"), cluster)["nodeSelector"] == {"pool": "gpu"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(
            ({"mounts": (Mount(source, "/workspace", read_only=False),)}, "mounts")
            for source in (
                "/etc",
                "/srv/trainyard",
                "/srv/trainyard-other/x",
                "/srv/trainyard/../etc",
                "relative",
            )
        ),
        ({"mounts": (Mount("/srv/trainyard/d", "/datasets/a:b"),)}, "mounts"),
        ({"packages": "/etc"}, "packages"),
        ({"image": Image(builtin="horovod")}, "image"),
    ],
)
def test_an_invalid_spec_is_refused_with_its_field(changes, field):
    with pytest.raises(InvalidSpec) as caught:
        everything(spec(**changes), config())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("registry", "key"),
    [("registry.acme.example", "registry.acme.example"), ("docker.io", "https://index.docker.io/v1/")],
)
def test_the_pull_secret_holds_the_registry_credentials(registry, key):
    run = dataclasses.replace(gpu_run(), pull_secret=PullSecret(registry, "acme", "hunter2"))
    (pull,) = [one for one in everything(run, config(**GPU)) if one.get("type") == "kubernetes.io/dockerconfigjson"]
    auths = json.loads(base64.b64decode(pull["data"][".dockerconfigjson"]))["auths"]
    assert {name: entry["password"] for name, entry in auths.items()} == {key: "hunter2"}


def test_only_installations_reach_the_package_index():
    installation, run = (
        of_kind("NetworkPolicy", OBJECTS[name]())["spec"]["egress"] for name in ("installation", "packages")
    )
    assert len(run) == 2, "the run's own Pods, and DNS"
    networks = [{"ipBlock": {"cidr": "10.20.0.5/32"}}]
    assert installation[2:] == [{"to": networks, "ports": [{"protocol": "TCP", "port": 443}]}]


def test_organization_namespaces_are_unique():
    cluster = config(namespace_per_organization=True)
    names = [organization_namespace(cluster, slug) for slug in ("acme", "Acme", "acme!", "a" * 60, "a" * 61, "ac-me")]
    assert len(set(names)) == len(names)
    assert names[0] == "trainyard-runs-acme"
    assert all(len(name) <= 63 for name in names), "the limit of Kubernetes"
    # A customer can choose a slug that equals the end of another organization's namespace.
    taken = organization_namespace(cluster, "a_b")
    assert organization_namespace(cluster, taken.removeprefix("trainyard-runs-")) != taken
    assert organization_namespace(config(), "acme") == "trainyard-runs"


def test_pod_limits_exceed_the_runs_limits():
    pod = pod_of(spec(grace_seconds=10), config())
    assert pod["terminationGracePeriodSeconds"] > 10
    longest = config().gang_seconds + config().start_seconds + spec().deadline_seconds
    assert pod["activeDeadlineSeconds"] > longest


def test_roles_have_no_wildcards():
    rules = [rule for one in rbac.rbac(config()) for rule in one.get("rules", [])]
    assert not any("*" in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]] for rule in rules)
    (role,) = [one for one in rbac.rbac(config()) if one["kind"] == "Role"]
    secrets = next(rule for rule in role["rules"] if rule["resources"] == ["secrets"])
    assert "list" not in secrets["verbs"], "a list shows what the Secrets hold"


def test_secrets_are_only_in_a_secret_of_the_run():
    # One secret is named like the platform's own key `token`.
    run = dataclasses.replace(
        gpu_run(), secrets={"API_TOKEN": "s3cr3t-of-the-test", "token": "other"}, environment={"NCCL_DEBUG": "INFO"}
    )
    objects = {(each["kind"], each["metadata"]["name"]): each for each in everything(run, config(**GPU))}
    secret = objects.pop(("Secret", "job-7-1-secrets"))
    values = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    assert values == run.secrets
    assert secret["metadata"]["ownerReferences"][0]["uid"] == UID
    text = json.dumps([each for (kind, _name), each in objects.items() if kind != "Secret"]) + repr(run) + run.to_json()
    for value in ("s3cr3t-of-the-test", "hunter2", "acme:hunter2", *KEYS.values()):
        assert value not in text
        assert base64.b64encode(value.encode()).decode() not in text
    (container,) = objects["Job", "job-7-1"]["spec"]["template"]["spec"]["containers"]
    references = {each["name"]: each.get("valueFrom") for each in container["env"]}
    assert references["TRAINYARD_SECRET_API_TOKEN"] == {"secretKeyRef": {"name": "job-7-1-secrets", "key": "API_TOKEN"}}
    assert json.loads(objects["ConfigMap", "job-7-1"]["data"]["order.json"])["variables"] == {"NCCL_DEBUG": "INFO"}
    for each, version in itertools.product([secret, *objects.values()], VERSIONS):
        schemas.validate(each, version)


@pytest.mark.parametrize(
    ("reference", "pinned"),
    [
        ("registry.example.com:5000/team/train:1.2", "registry.example.com:5000/team/train@sha256:{}"),
        ("registry.example.com/train", "registry.example.com/train@sha256:{}"),
        ("registry.example.com/train:1@sha256:" + "b" * 64, "registry.example.com/train@sha256:{}"),
    ],
)
def test_an_image_is_pulled_by_its_digest(reference, pinned):
    run = spec(image=Image(reference=reference, digest="sha256:" + "a" * 64))
    cluster = config(pythons={reference: "/opt/bin/python3"})
    (container,) = pod_of(run, cluster)["containers"]
    assert container["image"] == pinned.format("a" * 64)
    assert container["command"][0] == "/opt/bin/python3"
