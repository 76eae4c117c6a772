import pytest

from console.accounts.errors import InvalidInput
from jobs import dispatch
from jobs.purchase import parse
from jobs.resilience import USUAL_BACKOFF_SECONDS
from jobs.sentences import terms_sentences
from runtime.specs import Controller
from storage.models import Image


def faults(customer, **changes):
    with pytest.raises(InvalidInput) as caught:
        parse(organization=customer.organization, data=customer.form(**changes))
    return {name: str(sentence) for name, sentence in caught.value.fields.items()}


def bought(customer, **changes):
    return parse(organization=customer.organization, data=customer.form(**changes)).resilience


@pytest.fixture
def horovod(customer):
    Image.objects.filter(name="pytorch").update(frameworks=["pytorch", "horovod"])
    return {"framework": "horovod"}


def test_left_out_it_is_the_run_of_before(customer):
    plain = bought(customer)
    assert plain.to_json() == {
        "retries": 0, "retry_backoff_seconds": 0, "on_hang": "stop", "min_nodes": 0, "controller": "gloo",
        "collective_timeout_seconds": 0, "stall_check_seconds": 0,
    }  # fmt: skip
    empty = dict.fromkeys(plain.to_json(), "")
    assert bought(customer, **empty) == plain
    assert terms_sentences(plain.to_json()) == []


def test_it_is_bought_kept_and_handed_to_the_cluster(customer, backend, horovod):
    backend.images_with_mpi.add("pytorch")
    job = customer.job(
        retries="2", retry_backoff_seconds=5, on_hang="retry", min_nodes=1, controller="mpi",
        collective_timeout_seconds="600", stall_check_seconds=90, **horovod,
    )  # fmt: skip
    dispatch.start(job)
    spec = backend.runs[f"job-{job.pk}-1"].spec
    assert (spec.min_nodes, spec.controller) == (1, Controller.MPI)
    assert (spec.collective_timeout_seconds, spec.stall_check_seconds) == (600, 90)
    assert (job.retries, job.retry_backoff_seconds, job.on_hang) == (2, 5, "retry")
    assert len(terms_sentences(job.order.quote.purchase)) == 2


def test_a_back_off_belongs_to_retries(customer):
    assert bought(customer, retries=1).retry_backoff_seconds == USUAL_BACKOFF_SECONDS
    assert bought(customer, retries=1, retry_backoff_seconds=0).retry_backoff_seconds == 0
    assert bought(customer, retries=0, retry_backoff_seconds=90).retry_backoff_seconds == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"retries": 6}, "retries"),
        ({"retries": -1}, "retries"),
        ({"retries": "many"}, "retries"),
        ({"retries": 1, "retry_backoff_seconds": 99_999}, "retry_backoff_seconds"),
        ({"on_hang": "dance"}, "on_hang"),
        ({"on_hang": "retry"}, "on_hang"),
        ({"min_nodes": 3}, "min_nodes"),
        ({"controller": "carrier pigeon"}, "controller"),
        ({"controller": "mpi"}, "controller"),
        ({"collective_timeout_seconds": 1}, "collective_timeout_seconds"),
        ({"stall_check_seconds": 60}, "stall_check_seconds"),
    ],
    ids=str,
)
def test_what_can_not_be_is_told_at_its_field(customer, changes, field):
    assert list(faults(customer, **changes)) == [field]


def test_tensorflow_needs_all_its_nodes(customer):
    Image.objects.filter(name="pytorch").update(frameworks=["tensorflow"])
    assert "all its nodes" in faults(customer, framework="tensorflow", min_nodes=1)["min_nodes"]
    assert bought(customer, framework="tensorflow", min_nodes=2).min_nodes == 0


def test_an_image_without_mpi_is_refused_with_a_sentence(customer, backend, horovod):
    assert "has no MPI" in faults(customer, controller="mpi", **horovod)["controller"]
    backend.images_with_mpi.add("pytorch")
    assert bought(customer, controller="mpi", **horovod).controller is Controller.MPI


def test_a_cluster_that_is_away_refuses_no_controller(customer, backend, horovod):
    backend.available = False
    assert bought(customer, controller="mpi", **horovod).controller is Controller.MPI
