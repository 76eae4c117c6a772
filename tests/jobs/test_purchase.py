import dataclasses

import pytest

from billing.models import NodeSpec, Quote
from console.accounts.errors import InvalidInput
from jobs.models import Product
from jobs.purchase import parse
from runtime.specs import Capacity, Framework
from tests.factories.jobs import never_fits
from tests.factories.storage import DatasetFactory, DatasetVersionFactory, ImageFactory, WorkspaceFactory


def faults(customer, **changes):
    with pytest.raises(InvalidInput) as caught:
        parse(organization=customer.organization, data=customer.form(**changes))
    return {name: str(sentence) for name, sentence in caught.value.fields.items()}


def read(customer, **changes):
    return parse(organization=customer.organization, data=customer.form(**changes))


BAD = [
    ("framework", value) for value in ("mxnet", "", None, 5, [], {}, "PyTorch\0")
] + [
    ("image", value) for value in ("windows", "", None, 5, ["pytorch"], "\ud800")
] + [
    ("product", value) for value in ("gold", None, "a\0b", "\udfff", {})
] + [
    ("workspace", value) for value in ("nowhere", None, 1)
] + [
    ("node_spec", value) for value in ("huge", None, "a\0")
] + [
    ("nodes", value) for value in (0, -1, "0", "two", 2.5, True, None, "", [], 10**30, "9" * 5000)
] + [
    ("workers_per_node", value) for value in (0, -1, 99, "x", 1.5, [], {})
] + [
    ("epochs", value) for value in (0, -1, "many", None, 10_001, 1e3)
] + [
    ("batch_size", value) for value in (0, None, 10**7, "3.0")
] + [
    ("lr", value) for value in ("abc", "nan", "NaN", "sNaN", "inf", "-inf", "0", 0, "-1", None, "", True, [], "1e-999",
                                "1e999", "0." + "0" * 40 + "1", "1e99999999999999999999")
] + [
    ("code_path", value) for value in ("../secret.py", "/etc/passwd", "a/../../b.py", "missing.py", "", None, 7, ".",
                                       "data", "notes.txt", "link.py", "a\0.py", "\ud800.py", "a" * 1001 + ".py")
] + [
    ("arguments", value) for value in (5, {"a": 1}, [["a"]], [None], "it's", ["a\0"], ["\ud800"], ["x" * 9000])
] + [
    ("datasets", value) for value in ("nothing", ["nothing"], 5, [5], ["empty"], ["full", "full"],
                                      [f"d{n}" for n in range(101)])
] + [
    ("max_seconds", value) for value in (0, 59, "soon", [], {}, 10**9)
] + [
    ("ceiling_minor", value) for value in (0, -5, "cheap", [], 10**13)
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda part: repr(part)[:40])
def test_what_is_wrong_is_told_at_its_field_alone(customer, field, value):
    customer.write("notes.txt")
    customer.write("data/x")
    (customer.folder / "link.py").symlink_to("/etc/passwd")
    DatasetFactory(organization=customer.organization, name="empty")
    DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="full"))
    found = faults(customer, **{field: value})
    assert list(found) == [field]
    assert found[field].endswith(".")
    assert "codec" not in found[field]
    assert "NUL (0x00)" not in found[field]


def test_all_faults_are_told_at_once(customer):
    wrong = {
        "product": "gold", "framework": "mxnet", "image": "windows", "workspace": "nowhere", "epochs": 0, "lr": "abc",
        "batch_size": "x", "node_spec": "huge", "nodes": 0, "workers_per_node": -1, "max_seconds": 1,
        "ceiling_minor": 0, "arguments": 5, "datasets": "nothing",
    }  # fmt: skip
    assert set(faults(customer, **wrong)) == set(wrong)
    assert not Quote.objects.exists()


def test_an_empty_request_is_told_what_it_needs(customer):
    with pytest.raises(InvalidInput) as caught:
        parse(organization=customer.organization, data={})
    assert {"product", "framework", "image", "workspace", "code_path", "nodes", "lr", "epochs"} <= set(
        caught.value.fields
    )


def test_it_reads_what_forms_and_json_send(customer):
    dataset = DatasetFactory(organization=customer.organization, name="digits")
    version = DatasetVersionFactory(dataset=dataset)
    customer.write("src/run.py")
    found = read(
        customer, code_path="src//run.py", arguments="--x 'a b'", datasets=" digits, ", epochs="3", lr=" 1e-3 ",
        nodes="2", workers_per_node="", max_seconds="", ceiling_minor="",
    )  # fmt: skip
    assert found.code_path == "src/run.py"
    assert found.arguments == ("--x", "a b")
    assert found.dataset_versions == (version,)
    assert (found.epochs, found.lr, found.nodes, found.workers_per_node) == (3, "1e-3", 2, 1)
    assert found.max_seconds is None
    assert found.framework is Framework.PYTORCH


def test_its_json_is_read_again_as_the_same_purchase(customer):
    dataset = DatasetFactory(organization=customer.organization, name="digits")
    first = DatasetVersionFactory(dataset=dataset)
    found = read(customer, datasets=["digits"], arguments=["--a", "b"])
    data = found.to_json()
    DatasetVersionFactory(dataset=dataset)
    again = parse(organization=customer.organization, data=data, pinned=data["dataset_versions"])
    assert again == found
    assert again.dataset_versions == (first,)
    latest = parse(organization=customer.organization, data=data)
    assert latest.dataset_versions != (first,)


def test_the_versions_are_not_the_customers_to_choose(customer, other):
    foreign = DatasetVersionFactory(dataset=DatasetFactory(organization=other.organization, name="digits"))
    own = DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"))
    for pinned in (5, {"a": 1}, [foreign.pk], "x"):
        assert read(customer, datasets=["digits"], dataset_versions=pinned).dataset_versions == (own,)
    with pytest.raises(InvalidInput):
        parse(organization=customer.organization, data=customer.form(datasets=["digits"]), pinned=[foreign.pk])


def test_what_belongs_to_another_organization_is_not_there(customer, other):
    ImageFactory(organization=other.organization, name="theirs", reference="r.example/x")
    WorkspaceFactory(organization=other.organization, name="theirs")
    DatasetVersionFactory(dataset=DatasetFactory(organization=other.organization, name="theirs"))
    found = faults(customer, image="theirs", workspace="theirs", datasets=["theirs"])
    assert set(found) == {"image", "workspace", "datasets"}
    assert set(found.values()) == {"There is no such object here."}


def test_an_image_without_the_framework_is_refused(customer):
    assert "tensorflow" in faults(customer, framework="tensorflow")["image"]


def test_nodes_that_never_fit_are_refused_with_what_would(customer):
    assert "can never fit this cluster: it has room for 4" in faults(customer, nodes=5, node_spec="medium")["nodes"]
    customer.quota(max_running_nodes=3)
    assert "may run 3 nodes" in faults(customer, nodes=4)["nodes"]
    never_fits(customer)
    customer.quota(max_running_nodes=8)
    told = faults(customer, nodes=1, node_spec="medium")["nodes"]
    assert told == "No machine of this cluster can hold a node of medium. Choose another node spec."


def test_machines_that_are_not_for_a_node_spec_do_not_count(customer, backend, monkeypatch):
    (machine,) = backend.capacity().machines
    kept = dataclasses.replace(machine, closed_to=frozenset({"nano"}))
    monkeypatch.setattr(backend, "capacity", lambda: Capacity((kept,), kinds=frozenset({"nano"})))
    assert "can hold a node of nano" in faults(customer, node_spec="nano")["nodes"]
    assert read(customer, node_spec="small").nodes == 2


def test_a_cluster_that_grows_when_it_is_asked_refuses_nothing(customer, backend, monkeypatch):
    monkeypatch.setattr(backend, "capacity", lambda: Capacity((), elastic=True))
    assert read(customer, nodes=5, node_spec="medium").nodes == 5


def test_a_cluster_that_is_away_does_not_keep_anybody_from_a_quote(customer, backend):
    backend.available = False
    assert read(customer, nodes=8).nodes == 8


def test_what_is_no_longer_offered_is_refused(customer):
    Product.objects.filter(name="metered").update(is_active=False)
    NodeSpec.objects.filter(name="nano").update(is_active=False)
    assert set(faults(customer)) == {"product", "node_spec"}


def test_a_gpu_spec_has_one_process_for_each_gpu(customer):
    NodeSpec.objects.filter(name="nano").update(gpus=2, gpu_type="H200", cpus=1)
    customer.backend.available = False
    assert read(customer, workers_per_node=None).workers_per_node == 2
    assert "1 to 2" in faults(customer, workers_per_node=3)["workers_per_node"]


def test_the_code_key_is_of_the_script_not_its_settings(customer):
    customer.write("b.py")
    keys = [read(customer, **changes).code_key for changes in ({}, {"lr": "1"}, {"nodes": 1}, {"code_path": "b.py"})]
    assert len(set(keys[:3])) == 1
    assert keys[3] != keys[0]
