"""Orders with a customer's own image on a Slurm cluster: what is sold, and what is refused before any price."""

import pytest

from billing.models import NodeSpec
from jobs import images
from runtime.backends.slurm.backend import SlurmBackend
from runtime.backends.slurm.config import SlurmConfig
from storage.models import Image

pytestmark = pytest.mark.django_db


@pytest.fixture
def own(customer):
    """An image in the customer's own registry."""
    return Image.objects.create(
        organization=customer.organization, name="own", title="Own", frameworks=["pytorch", "horovod"],
        reference="registry.example.com/team/train:1",
    )  # fmt: skip


@pytest.fixture
def slurm(settings, tmp_path, monkeypatch):
    """Return a function that makes a Slurm cluster with these settings the only one."""

    def connect(**data):
        config = SlurmConfig.from_data("default", data)
        settings.TRAINYARD_CLUSTERS = {"default": config}
        backend = SlurmBackend(config=config, root=tmp_path / "runs", images_root=tmp_path / "images")
        for module in ("jobs.images", "jobs.purchase", "jobs.fault_tolerance"):
            monkeypatch.setattr(f"{module}.cluster", lambda _name="": backend)

    return connect


def test_own_images_are_sold_only_where_containers_are_set(customer, own, slurm):
    slurm()
    assert "pulls no images" in customer.refusals(image="own")["image"]
    assert "pulls no images" in images.problem(own)
    assert not images.any_cluster_pulls_images()
    slurm(containers="oci")
    assert images.problem(own) == ""
    assert images.any_cluster_pulls_images()
    assert customer.quote(image="own").ceiling_minor > 0


@pytest.mark.usefixtures("own")
def test_mpi_packages_and_gpus_are_refused_for_own_images(customer, slurm):
    slurm(containers="oci")
    assert "Choose Gloo" in customer.refusals(image="own", framework="horovod", controller="mpi")["controller"]
    customer.write("requirements.txt", "einops\n")
    refused = customer.refusals(image="own", requirements="requirements.txt")
    assert "in addition to your own images" in refused["requirements"]
    NodeSpec.objects.filter(name="nano").update(gpus=1)
    assert "can't give GPUs to your own images" in customer.refusals(image="own")["image"]
