"""Valid and invalid purchases, including their fault tolerance."""

import dataclasses

import pytest

from billing.models import NodeSpec
from console.core.errors import InvalidInput
from jobs.fault_tolerance import DEFAULT_BACKOFF_SECONDS
from jobs.messages import terms_sentences
from jobs.models import Product
from jobs.purchase import parse
from runtime.specs import Capacity, Controller, Framework
from storage import retention
from storage.models import Image
from tests.factories.jobs import make_medium_too_large, start
from tests.factories.storage import DatasetFactory, DatasetVersionFactory, ImageFactory, WorkspaceFactory


def read(customer, **changes):
    """Return the valid purchase."""
    return parse(organization=customer.organization, data=customer.form(**changes))


INVALID = {
    "framework": ("mxnet", "", None, 5, [], {}, "PyTorch\0"),
    "image": ("windows", "", None, 5, ["pytorch"], "\ud800"),
    "product": ("gold", None, "a\0b", "\udfff", {}),
    "workspace": ("nowhere", None, 1),
    "node_spec": ("huge", None, "a\0"),
    "nodes": (0, -1, "0", "two", 2.5, True, None, "", [], 10**30, "9" * 5000),
    "workers_per_node": (0, -1, 99, "x", 1.5, [], {}),
    "epochs": (0, -1, "many", None, 10_001, 1e3),
    "batch_size": (0, None, 10**7, "3.0"),
    "lr": ("abc", "nan", "NaN", "sNaN", "inf", "-inf", "0", 0, "-1", None, "", True, [], "1e-999", "1e999",
           "0." + "0" * 40 + "1", "1e99999999999999999999"),
    "code_path": ("../secret.py", "/etc/passwd", "a/../../b.py", "missing.py", "", None, 7, ".", "data", "notes.txt",
                  "link.py", "a\0.py", "\ud800.py", "a" * 1001 + ".py"),
    "environment": (5, ["A"], "A", {"A": [1]}, {"": "x"}), "secrets": (5, {"A": 1}, ["A"]),
    "arguments": (5, {"a": 1}, [["a"]], [None], [True], "it's", ["a\0"], ["\ud800"], ["x" * 9000]),
    "datasets": ("nothing", ["nothing"], 5, [5], ["empty"], ["full", "full"], [f"d{n}" for n in range(101)]),
    "max_seconds": (0, 59, "soon", [], {}, 10**9),
    "ceiling_minor": (0, -5, "cheap", [], 10**13),
    # A retry after a hang needs retries, the run has 2 nodes, built-in PyTorch has no MPI, and only Horovod has a stall
    # check.
    "retries": (6, -1, "many"), "on_hang": ("dance", "retry"), "min_nodes": (3,), "controller": ("x", "mpi"),
    "collective_timeout_seconds": (1,), "stall_check_seconds": (60,),
}  # fmt: skip


def test_an_error_is_reported_only_at_its_field_and_all_errors_at_once(customer):
    customer.write("notes.txt")
    customer.write("data/x")
    (customer.folder / "link.py").symlink_to("/etc/passwd")
    DatasetFactory(organization=customer.organization, name="empty")
    DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="full"))
    for field, value in [(name, value) for name, values in INVALID.items() for value in values]:
        errors = customer.refusals(**{field: value})
        assert list(errors) == [field], value
        assert errors[field].endswith(".")
        assert not any(words in errors[field] for words in ("codec", "NUL (0x00)"))
    assert customer.refusals(lr="0." + "1" * 31)["lr"] == "The learning rate must have at most 32 characters."
    assert "must be a number" in customer.refusals(lr="nan")["lr"]
    assert "too large" in customer.refusals(lr="1e999")["lr"]
    assert set(customer.refusals(node_spec="none", from_checkpoint=1)) == {"node_spec"}
    # Fields that are left unchecked when a field on which they depend is invalid.
    dependent = {"code_path", "on_hang", "min_nodes", "controller", "collective_timeout_seconds", "stall_check_seconds"}
    wrong = {name: values[0] for name, values in INVALID.items() if name not in dependent}
    assert set(customer.refusals(**wrong)) == set(wrong)
    with pytest.raises(InvalidInput) as caught:
        parse(organization=customer.organization, data={})
    required = {"product", "framework", "image", "workspace", "code_path", "nodes", "lr", "epochs"}
    assert required <= set(caught.value.fields)
    assert "tensorflow" in customer.refusals(framework="tensorflow")["image"]
    Product.objects.filter(name="metered").update(is_active=False)
    NodeSpec.objects.filter(name="nano").update(is_active=False)
    assert set(customer.refusals()) == {"product", "node_spec"}


def test_values_are_read_as_forms_and_json_send_them(customer):
    dataset = DatasetFactory(organization=customer.organization, name="digits")
    version = DatasetVersionFactory(dataset=dataset)
    customer.write("src/run.py")
    purchase = read(
        customer, code_path="src//run.py", arguments="--x 'a b'", datasets=" digits, ", epochs="3", lr=" 1e-3 ",
        nodes="2", workers_per_node="", max_seconds="", ceiling_minor="",
    )  # fmt: skip
    assert purchase.code_path == "src/run.py"
    assert purchase.arguments == ("--x", "a b")
    assert purchase.dataset_versions == (version,)
    assert (purchase.epochs, purchase.lr, purchase.nodes, purchase.workers_per_node) == (3, "1e-3", 2, 1)
    assert purchase.max_seconds is None
    assert purchase.framework is Framework.PYTORCH


def test_a_version_of_a_dataset_can_be_chosen(customer):
    dataset = DatasetFactory(organization=customer.organization, name="digits")
    first, second, latest = (DatasetVersionFactory(dataset=dataset, number=number) for number in (1, 2, 3))
    for chosen, version in (("digits", latest), ("digits@3", latest), ("digits@1", first)):
        assert read(customer, datasets=[chosen]).dataset_versions == (version,)
        assert read(customer, datasets=chosen).dataset_versions == (version,)
    plain, purchase = read(customer, datasets=["digits"], arguments=["--a", "b"]), read(customer, datasets=["digits@2"])
    newest = DatasetVersionFactory(dataset=dataset, number=4)
    stored = purchase.to_json()
    assert (stored["datasets"], stored["resolved_datasets"]) == (["digits@2"], ["digits@2"])
    # An order uses the versions of its quote. A rerun uses the latest version of a dataset if none was chosen.
    assert parse(organization=customer.organization, data=plain.to_json(), uses_given_versions=True) == plain
    for uses_given_versions, data, version in (
        (True, plain, latest), (False, plain, newest), (True, purchase, second), (False, purchase, second),
    ):  # fmt: skip
        again = parse(organization=customer.organization, data=data.to_json(), uses_given_versions=uses_given_versions)
        assert again.dataset_versions == (version,)
    retention.delete_version(version=second)
    for wrong in ("digits@2", "digits@9"):
        assert "4, 3, 1" in customer.refusals(datasets=[wrong])["datasets"]
    for wrong in ("digits@", "digits@x", "digits@0", "digits@-1", "digits@1@2", "digits@" + "9" * 5000, "digits@²"):
        assert set(customer.refusals(datasets=[wrong])) == {"datasets"}
    assert set(customer.refusals(datasets=["digits@1", "digits"])) == {"datasets"}


def test_objects_of_another_organization_do_not_exist(customer, other):
    ImageFactory(organization=other.organization, name="theirs", reference="r.example/x")
    WorkspaceFactory(organization=other.organization, name="theirs")
    foreign = DatasetVersionFactory(dataset=DatasetFactory(organization=other.organization, name="theirs"))
    errors = customer.refusals(image="theirs", workspace="theirs", datasets=["theirs"])
    assert set(errors) == {"image", "workspace", "datasets"}
    assert set(errors.values()) == {"This object does not exist in your organization."}
    own = DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"))
    for pinned in (5, {"a": 1}, [foreign.pk], "x"):  # ignored: only a stored quote has this field
        assert read(customer, datasets=["digits"], dataset_versions=pinned).dataset_versions == (own,)
    data = customer.form(datasets=["digits"], dataset_versions=[foreign.pk])
    with pytest.raises(InvalidInput):
        parse(organization=customer.organization, data=data, uses_given_versions=True)


def test_nodes_that_never_fit_are_refused_with_what_would(customer):
    # The fake cluster has 8 cores, and a node of medium takes 2.
    too_many = customer.refusals(nodes=5, node_spec="medium")["nodes"]
    assert "do not fit in this cluster. It has capacity for at most 4" in too_many
    customer.quota(max_running_nodes=3)
    assert "can run at most 3 nodes" in customer.refusals(nodes=4)["nodes"]
    make_medium_too_large()
    customer.quota(max_running_nodes=8)  # so that the quota is not the reason
    error = customer.refusals(nodes=1, node_spec="medium")["nodes"]
    assert error == "No machine in this cluster is large enough for a node of medium. Choose another node spec."


def test_only_machines_for_the_node_spec_count_and_an_elastic_or_absent_cluster_refuses_nothing(
    customer, backend, monkeypatch
):
    (machine,) = backend.capacity().machines
    # In this cluster nodes of nano have a placement of their own (`placed_kinds`), which excludes this machine
    # (`closed_to`). Nodes of other specs are placed on any machine.
    closed = dataclasses.replace(machine, closed_to=frozenset({"nano"}))
    with monkeypatch.context() as patch:
        patch.setattr(backend, "capacity", lambda: Capacity((closed,), placed_kinds=frozenset({"nano"})))
        assert "is large enough for a node of nano" in customer.refusals(node_spec="nano")["nodes"]
        assert read(customer, node_spec="small").nodes == 2
        patch.setattr(backend, "capacity", lambda: Capacity((), elastic=True))
        assert read(customer, nodes=5, node_spec="medium").nodes == 5
    backend.available = False
    assert read(customer, nodes=8).nodes == 8


def test_a_gpu_spec_has_one_process_for_each_gpu_and_refuses_images_that_would_leave_them_idle(customer, backend):
    NodeSpec.objects.filter(name="nano").update(gpus=2, gpu_type="H200", cpus=1)
    assert "image" not in customer.refusals(nodes=0)  # `nodes` is invalid, so that there are messages to read
    backend.images_for_cpus.add("pytorch")
    assert "cannot use GPUs" in customer.refusals(nodes=0)["image"]
    backend.available = False  # so that nothing is refused because of the image or of missing GPUs
    assert read(customer, workers_per_node=None).workers_per_node == 2
    assert "1 to 2" in customer.refusals(workers_per_node=3)["workers_per_node"]


# --- Fault tolerance -------------------------------------------------------------------------------------------------


def bought(customer, **changes):
    return read(customer, **changes).fault_tolerance


@pytest.fixture
def horovod(customer):
    """The fields of a purchase that choose Horovod, which the image `pytorch` then has too."""
    Image.objects.filter(name="pytorch").update(frameworks=["pytorch", "horovod"])
    return {"framework": "horovod"}


def test_fault_tolerance_is_stored_and_passed_to_the_cluster(customer, backend, horovod):
    backend.images_with_mpi.add("pytorch")
    job = customer.job(
        retries="2", retry_backoff_seconds=5, on_hang="retry", min_nodes=1, controller="mpi",
        collective_timeout_seconds="600", stall_check_seconds=90, **horovod,
    )  # fmt: skip
    start(job)
    spec = backend.runs[f"job-{job.pk}-1"].spec
    assert (spec.min_nodes, spec.controller) == (1, Controller.MPI)
    assert (spec.collective_timeout_seconds, spec.stall_check_seconds) == (600, 90)
    assert (job.retries, job.retry_backoff_seconds, job.on_hang) == (2, 5, "retry")
    assert len(terms_sentences(job.order.quote.purchase)) == 2, "about the retries and about the minimum of nodes"


def test_by_default_there_is_no_fault_tolerance_and_a_back_off_belongs_to_retries(customer):
    plain = bought(customer)
    assert plain.to_json() == {
        "retries": 0, "retry_backoff_seconds": 0, "on_hang": "stop", "min_nodes": 0, "controller": "gloo",
        "collective_timeout_seconds": 0, "stall_check_seconds": 0,
    }  # fmt: skip
    assert bought(customer, **dict.fromkeys(plain.to_json(), "")) == plain
    assert terms_sentences(plain.to_json()) == []
    assert bought(customer, retries=1).retry_backoff_seconds == DEFAULT_BACKOFF_SECONDS
    assert bought(customer, retries=1, retry_backoff_seconds=0).retry_backoff_seconds == 0
    assert bought(customer, retries=0, retry_backoff_seconds=90).retry_backoff_seconds == 0
    assert list(customer.refusals(retries=1, retry_backoff_seconds=99_999)) == ["retry_backoff_seconds"]


def test_tensorflow_needs_all_its_nodes(customer):
    Image.objects.filter(name="pytorch").update(frameworks=["tensorflow"])
    assert "fewer nodes" in customer.refusals(framework="tensorflow", min_nodes=1)["min_nodes"]
    assert bought(customer, framework="tensorflow", min_nodes=2).min_nodes == 0, "a minimum of all nodes is no minimum"


def test_mpi_is_used_where_the_image_has_it(customer, backend, horovod):
    assert "has no MPI" in customer.refusals(controller="mpi", **horovod)["controller"]
    backend.images_with_mpi.add("pytorch")
    assert bought(customer, controller="mpi", **horovod).controller is Controller.MPI
    assert "has no MPI support" in customer.refusals(controller="mpi")["controller"], "built-in PyTorch lacks MPI"
    Image.objects.create(
        organization=customer.organization, name="own", reference="r.example.com/own:1", frameworks=["pytorch"]
    )
    # For the backend, a customer's own image has the name "". A backend accepts MPI for it, since only the run shows
    # whether it has mpirun.
    backend.images_with_mpi.add("")
    assert bought(customer, controller="mpi", image="own").controller is Controller.MPI
    Image.objects.filter(name="own").update(frameworks=["tensorflow"])
    tensorflow = customer.refusals(controller="mpi", image="own", framework="tensorflow")
    assert "does not use MPI" in tensorflow["controller"]
    backend.images_with_mpi.clear()
    backend.available = False  # a cluster that cannot be asked refuses nothing
    assert bought(customer, controller="mpi", **horovod).controller is Controller.MPI
