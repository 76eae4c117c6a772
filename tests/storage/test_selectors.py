from __future__ import annotations

from collections.abc import Callable

import pytest
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from console.accounts.errors import NotFound
from console.accounts.models import Membership
from storage import selectors
from storage.models import Dataset, Image, Workspace
from tests.factories.storage import DatasetFactory, DatasetVersionFactory, ImageFactory, WorkspaceFactory

pytestmark = pytest.mark.django_db


def test_images_are_the_builtin_ones_and_ones_own(owner: Membership, stranger: Membership) -> None:
    ImageFactory(name="builtin")
    ImageFactory(name="old", is_active=False)
    ImageFactory(name="mine", organization=owner.organization)
    ImageFactory(name="theirs", organization=stranger.organization)
    assert {image.name for image in selectors.images_for(owner.organization)} == {"builtin", "mine"}
    assert selectors.image_named(owner.organization, "mine").name == "mine"
    for name in ("old", "theirs", "none"):
        with pytest.raises(NotFound):
            selectors.image_named(owner.organization, name)


@pytest.mark.parametrize(
    ("factory", "named", "listed"),
    [
        (DatasetFactory, selectors.dataset_named, selectors.datasets_for),
        (WorkspaceFactory, selectors.workspace_named, selectors.workspaces_for),
    ],
)
def test_nobody_sees_anothers_or_deleted_things(
    owner: Membership,
    stranger: Membership,
    factory: type[DatasetFactory | WorkspaceFactory],
    named: Callable[..., Dataset | Workspace | Image],
    listed: Callable[..., object],
) -> None:
    mine = factory(organization=owner.organization, name="mine")
    factory(organization=stranger.organization, name="theirs")
    factory(organization=owner.organization, name="gone", deleted_at=timezone.now())
    assert list(listed(owner.organization)) == [mine]
    assert named(owner.organization, "mine") == mine
    for name in ("theirs", "gone", "none", "", "a\0", "MINE"):
        with pytest.raises(NotFound):
            named(owner.organization, name)


def test_datasets_come_with_their_latest_version_in_one_query(
    owner: Membership, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    for number in range(5):
        dataset = DatasetFactory(organization=owner.organization, name=f"d{number}")
        for version in range(number):
            DatasetVersionFactory(dataset=dataset, number=version + 1)
    with django_assert_num_queries(1):
        found = {dataset.name: dataset.latest for dataset in selectors.datasets_for(owner.organization)}
    assert [latest.number if latest else None for _name, latest in sorted(found.items())] == [None, 1, 2, 3, 4]
    dataset = selectors.dataset_named(owner.organization, "d4")
    assert selectors.latest_version(dataset) == dataset.latest
    assert [version.number for version in selectors.versions_of(dataset)] == [4, 3, 2, 1]
    assert selectors.latest_version(selectors.dataset_named(owner.organization, "d0")) is None
