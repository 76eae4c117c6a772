import json

import pytest
from django.core.exceptions import ImproperlyConfigured

from console.clusters import parse

WEST = {"backend": "kubernetes", "volume": {"claim": "runs", "root": "/srv/trainyard"}}


@pytest.mark.parametrize("text", ["", "  \n"])
def test_without_a_word_there_is_this_machine(text):
    assert parse(text) == {"default": None}


def test_clusters_keep_their_order_and_names():
    found = parse(json.dumps({"west": WEST, "here": {"backend": "local"}}))
    assert list(found) == ["west", "here"]
    assert found["west"].volume.claim == "runs"
    assert found["here"] is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "TRAINYARD_CLUSTERS is no JSON: Expecting property name"),
        ("[]", "must be a JSON object that names a cluster"),
        ("{}", "must be a JSON object that names a cluster"),
        ('{"a": {"backend": "local"}, "b": {"backend": "local"}}', "only one cluster can be local"),
        ('{"a": {"backend": "local", "cpus": 3}}', "'cpus' of the cluster 'a' is not known: .* LOCAL_CPUS"),
        ('{"a": {"backend": "slurm"}}', "'a' has the backend 'slurm'. There are: kubernetes, local"),
        ('{"a": 3}', "'a' must be a JSON object"),
        ('{"a": {}}', "'volume' must say where runs lie"),
        (json.dumps({"a": WEST | {"namespace": "No Good"}}), "'namespace' is 'No Good'"),
        (json.dumps({"a": WEST | {"gang_second": 3}}), "'gang_second' is not known"),
        (json.dumps({"A_b": WEST}), "'A_b' cannot name a cluster"),
        (json.dumps({"a" * 33: WEST}), "longer than 32"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(text, sentence):
    with pytest.raises(ImproperlyConfigured, match=sentence):
        parse(text)


def test_another_kind_of_backend_needs_its_clusters_named():
    with pytest.raises(ImproperlyConfigured, match="RUNTIME_BACKEND is 'kubernetes': without TRAINYARD_CLUSTERS"):
        parse("", backend="kubernetes")
