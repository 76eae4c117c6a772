"""The settings of a Kubernetes cluster, and the errors that name them."""

import math

import pytest

from runtime.backends.kubernetes.config import ClusterConfig

VOLUME = {"claim": "trainyard", "root": "/srv/trainyard"}


def read(**data):
    return ClusterConfig.from_data("east", {"volume": VOLUME, **data})


def test_an_elastic_cluster_has_a_longer_default_for_gang_seconds():
    """`gang_seconds` is how long a run may be partly placed. An autoscaler needs minutes to add machines."""
    assert (read().elastic, read().gang_seconds) == (False, 300)
    assert (read(elastic=True).elastic, read(elastic=True).gang_seconds) == (True, 900)
    assert read(elastic=True, gang_seconds=60).gang_seconds == 60


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"volume": None}, "'volume' must be a JSON object"),
        ({"volume": {"root": "/srv"}}, "needs either a claim or a host_path"),
        ({"volume": {"root": "/srv", "claim": "a", "host_path": "/b"}}, "needs either a claim or a host_path"),
        ({"volume": {"claim": "a"}}, "needs an absolute path as its root"),
        ({"volume": {"claim": "a", "root": "/srv/../etc"}}, "needs an absolute path as its root"),
        ({"volume": {"root": "/srv", "host_path": "data"}}, "needs an absolute path as its host_path"),
        ({"volume": {"claim": "a", "root": "/srv", "shared": False}}, "'shared' must be true"),
        ({"volume": {"claim": "a", "root": "/srv", "claims": 1}}, "has no 'claims'"),
        ({"namespaces": "x"}, "'namespaces' is not a setting"),
        ({"backend": "local"}, "must be kubernetes here"),
        ({"namespace": "Not One"}, "which is not a namespace's name"),
        ({"namespace": "runs\n"}, "which is not a namespace's name"),
        ({"queue": "batch\n"}, "which is not a LocalQueue's name"),
        ({"topology_key": "zone\n"}, "which is not a label's name"),
        ({"node_selectors": {"gpu": {"pool": "a\n"}}}, "must map labels to values"),
        ({"namespace": 7}, "must be a string"),
        ({"in_cluster": "yes"}, "must be true or false"),
        ({"elastic": "yes"}, "'elastic' must be true or false"),
        ({"in_cluster": True, "context": "east"}, "excludes kubeconfig and context"),
        ({"images": {"pytorch": ""}}, "must map names to strings"),
        ({"flavours": {"pytorch": "rocm"}}, "must map names of images to cpu or cuda"),
        ({"spread": "wide"}, "must be one of pack, spread"),
        *(
            ({"package_index": {"url": "https://pypi.example.com", "networks": ["10.0.0.5/32"], **index}}, words)
            for index, words in (
                ({"networks": []}, "'package_index' must be"),
                ({"networks": ["pypi.example.com"]}, "'package_index' is not valid"),
                ({"url": "ftp://pypi.example.com"}, "needs an http or https address"),
                ({"url": "https://me:secret@pypi.example.com"}, "without a password"),
                ({"hosts": []}, "'package_index' must be"),
            )
        ),
        ({"gang_seconds": 0}, "must be a whole number of at least 1"),
        ({"gang_seconds": True}, "must be a whole number"),
        ({"image_pull_secrets": "mirror"}, "must be a list of names"),
        ({"node_selectors": {"gpu": {"pool": "a b"}}}, "must map labels to values for 'gpu'"),
        ({"tolerations": {"gpu": [{"keys": "pool"}]}}, "list of objects with key"),
        ({"tolerations": {"gpu": [{"key": "pool", "effect": "Never"}]}}, "an unknown effect for 'gpu'"),
        ({"tolerations": {"gpu": [{"key": "pool", "operator": "Exists", "value": "x"}]}}, "Exists without a value"),
        ({"tolerations": {"gpu": [{"key": "pool", "value": 7}]}}, "must have strings as its key"),
        ({"tolerations": {"gpu": [{"value": "x"}]}}, "needs a key for 'gpu'"),
        ({"capacity": [{"cpus": 4}]}, "must be a list of objects with cpus and memory_mib"),
        *(
            ({"capacity": [{"cpus": 4, "memory_mib": 4096, **bad}]}, "which are above 0")
            for bad in ({"cpus": -4}, {"cpus": math.nan}, {"memory_mib": math.inf}, {"gpus": -1}, {"count": -1})
        ),
    ],
)
def test_an_error_names_the_setting(data, words):
    with pytest.raises(ValueError, match=r"The cluster 'east'") as caught:
        read(**data)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["", "East", "east_2", "-east", "east\n"])
def test_a_clusters_name_must_be_a_kubernetes_label(name):
    with pytest.raises(ValueError, match="cannot name a cluster"):
        ClusterConfig.from_data(name, {"volume": VOLUME})
