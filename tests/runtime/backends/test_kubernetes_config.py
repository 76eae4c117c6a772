from typing import Any

import pytest

from runtime.backends.kubernetes_config import ClusterConfig, Toleration

VOLUME = {"claim": "trainyard", "root": "/srv/trainyard"}


def read(**data: Any) -> ClusterConfig:
    return ClusterConfig.from_data("east", {"volume": VOLUME, **data})


def test_little_need_be_said() -> None:
    config = ClusterConfig.from_data("east", {"backend": "kubernetes", "volume": VOLUME})
    assert (config.namespace, config.uid, config.spread, config.gang_guard) == ("trainyard-runs", 10001, "pack", True)
    assert config.volume.shared
    assert config.capacity is None


def test_everything_can_be_said() -> None:
    config = read(
        namespace="runs",
        kubeconfig="/etc/trainyard/east.yaml",
        context="east",
        images={"pytorch": "registry.example.com/pytorch:1"},
        queue="training",
        tolerations={"gpu": {"key": "pool", "operator": "Exists"}},
        node_selectors={"gpu": {"pool": "gpu"}},
        capacity=[{"name": "big", "count": 2, "cpus": 64, "memory_mib": 262144, "gpus": 8, "gpu_type": "A100"}],
    )
    assert config.tolerations["gpu"] == (Toleration(key="pool", operator="Exists"),)
    assert not config.gang_guard
    assert config.capacity is not None
    assert [machine.name for machine in config.capacity.machines] == ["big-0", "big-1"]
    assert config.capacity.machines[1].free.gpus == 8


def test_an_elastic_cluster_is_given_time_to_grow() -> None:
    assert (read().elastic, read().gang_seconds) == (False, 300)
    assert (read(elastic=True).elastic, read(elastic=True).gang_seconds) == (True, 900)
    assert read(elastic=True, gang_seconds=60).gang_seconds == 60


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"volume": None}, "'volume' must be a JSON object"),
        ({"volume": {}}, "'volume' must say where runs lie"),
        ({"volume": {"root": "/srv"}}, "needs either a claim or a host_path"),
        ({"volume": {"root": "/srv", "claim": "a", "host_path": "/b"}}, "needs either a claim or a host_path"),
        ({"volume": {"claim": "a"}}, "needs an absolute path as its root"),
        ({"volume": {"claim": "a", "root": "/srv/../etc"}}, "needs an absolute path as its root"),
        ({"volume": {"claim": "a", "root": "/"}}, "needs an absolute path as its root"),
        ({"volume": {"root": "/srv", "host_path": "data"}}, "needs an absolute path as its host_path"),
        ({"volume": {"claim": "a", "root": "/srv", "shared": False}}, "the console must see a claim"),
        ({"volume": {"claim": "a", "root": "/srv", "claims": 1}}, "has no 'claims'"),
        ({"namespaces": "x"}, "'namespaces' is not known"),
        ({"backend": "local"}, "must be kubernetes here"),
        ({"namespace": "Not One"}, "that is not a namespace's name"),
        ({"namespace": 7}, "must be a string"),
        ({"in_cluster": "yes"}, "must be true or false"),
        ({"elastic": "yes"}, "'elastic' must be true or false"),
        ({"in_cluster": True, "context": "east"}, "excludes kubeconfig and context"),
        ({"images": {"pytorch": ""}}, "must map names to strings"),
        ({"images": ["pytorch"]}, "must be a JSON object"),
        ({"spread": "wide"}, "must be one of pack, spread"),
        ({"gang_seconds": 0}, "must be a whole number of at least 1"),
        ({"gang_seconds": True}, "must be a whole number"),
        ({"uid": 0}, "must be a whole number of at least 1"),
        ({"image_pull_secrets": "mirror"}, "must be a list of names"),
        ({"node_selectors": {"gpu": "pool"}}, "must map labels to values for 'gpu'"),
        ({"node_selectors": {"gpu": {"pool": "a b"}}}, "must map labels to values for 'gpu'"),
        ({"tolerations": {"gpu": [{"keys": "pool"}]}}, "list of objects with key"),
        ({"tolerations": {"gpu": [{"key": "pool", "effect": "Never"}]}}, "an effect for 'gpu'"),
        ({"tolerations": {"gpu": [{"key": "pool", "operator": "Exists", "value": "x"}]}}, "Exists without a value"),
        ({"tolerations": {"gpu": [{"value": "x"}]}}, "needs a key for 'gpu'"),
        ({"capacity": [{"cpus": 4}]}, "must be a list of objects with cpus and memory_mib"),
        ({"capacity": 4}, "must be a list of objects with cpus and memory_mib"),
    ],
)
def test_what_is_wrong_is_said_with_its_name(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"The cluster 'east'") as caught:
        read(**data)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["", "East", "east_2", "-east"])
def test_a_clusters_name_is_a_label(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a cluster"):
        ClusterConfig.from_data(name, {"volume": VOLUME})


def test_what_is_read_cannot_be_changed() -> None:
    config = read(images={"pytorch": "x"})
    with pytest.raises(TypeError):
        config.images["pytorch"] = "y"  # type: ignore[index]
