"""Images, datasets, models and workspaces. Versions and workspaces have their folders on the disk."""

from __future__ import annotations

from typing import Any

import factory
from factory.django import DjangoModelFactory

from storage import selectors
from storage.models import Dataset, DatasetVersion, Image, Model, ModelVersion, Workspace, WorkspaceImport
from tests.factories.accounts import OrganizationFactory

LINEAGE = {
    "job": 1,
    "job_name": "train.py",
    "path": "outputs",
    "framework": "pytorch",
    "image": "pytorch",
    "workspace": "main",
    "code_path": "train.py",
    "arguments": [],
    "script_sha256": "",
    "epochs": 1,
    "lr": "0.01",
    "batch_size": 32,
    "datasets": [],
    "models": [],
    "from_checkpoint": None,
    "metrics": {},
    "price_minor": None,
    "currency": "USD",
}
"""How a model was made, without metrics."""


class ImageFactory(DjangoModelFactory):
    """A built-in image."""

    class Meta:
        model = Image

    name = factory.Sequence(lambda n: f"image-{n}")
    title = factory.LazyAttribute(lambda image: image.name.title())
    frameworks = ["pytorch"]


class DatasetFactory(DjangoModelFactory):
    """A dataset without a version."""

    class Meta:
        model = Dataset

    organization = factory.SubFactory(OrganizationFactory)
    name = factory.Sequence(lambda n: f"dataset-{n}")


class DatasetVersionFactory(DjangoModelFactory):
    """A published version, its dataset's latest. Its folder is empty; its sizes are invented."""

    class Meta:
        model = DatasetVersion

    dataset = factory.SubFactory(DatasetFactory)
    number = factory.Sequence(lambda n: n + 1)
    folder = factory.Faker("sha1")
    size_bytes = 3
    file_count = 1
    sha256 = "0" * 64

    @classmethod
    def _create(cls, model_class: type[DatasetVersion], *args: Any, **kwargs: Any) -> DatasetVersion:
        version: DatasetVersion = super()._create(model_class, *args, **kwargs)
        (selectors.root() / "datasets" / version.folder).mkdir(parents=True, exist_ok=True)
        Dataset.objects.filter(pk=version.dataset_id).update(latest=version)
        return version


class ModelFactory(DjangoModelFactory):
    """A model without a version."""

    class Meta:
        model = Model

    organization = factory.SubFactory(OrganizationFactory)
    name = factory.Sequence(lambda n: f"model-{n}")


class ModelVersionFactory(DjangoModelFactory):
    """A published version, its model's latest. Its folder is empty; its sizes are invented."""

    class Meta:
        model = ModelVersion

    model = factory.SubFactory(ModelFactory)
    number = factory.LazyAttribute(lambda version: version.model.versions.count() + 1)
    folder = factory.Faker("sha1")
    size_bytes = 3
    file_count = 1
    entry_count = 2
    sha256 = "0" * 64
    job_pk = 1
    lineage = LINEAGE

    @classmethod
    def _create(cls, model_class: type[ModelVersion], *args: Any, **kwargs: Any) -> ModelVersion:
        version: ModelVersion = super()._create(model_class, *args, **kwargs)
        (selectors.root() / "models" / version.folder).mkdir(parents=True, exist_ok=True)
        Model.objects.filter(pk=version.model_id).update(latest=version)
        return version


class WorkspaceFactory(DjangoModelFactory):
    """A workspace with an empty folder."""

    class Meta:
        model = Workspace

    organization = factory.SubFactory(OrganizationFactory)
    name = factory.Sequence(lambda n: f"workspace-{n}")
    folder = factory.Faker("sha1")

    @classmethod
    def _create(cls, model_class: type[Workspace], *args: Any, **kwargs: Any) -> Workspace:
        workspace: Workspace = super()._create(model_class, *args, **kwargs)
        (selectors.root() / "workspaces" / workspace.folder).mkdir(parents=True, exist_ok=True)
        return workspace


class WorkspaceImportFactory(DjangoModelFactory):
    """A waiting import of a git repository."""

    class Meta:
        model = WorkspaceImport

    organization = factory.SubFactory(OrganizationFactory)
    name = factory.Sequence(lambda n: f"import-{n}")
    git_url = "https://github.com/name/repository.git"
