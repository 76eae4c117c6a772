"""Search and order of the lists of datasets, models and workspaces."""

import re

import pytest
from django.urls import reverse

from tests.factories.storage import DatasetFactory, ModelVersionFactory, WorkspaceFactory


@pytest.mark.parametrize("kind", ["dataset", "model", "workspace"])
def test_a_list_is_searched_and_ordered(kind, customer, owner_page):
    organization = customer.organization
    for name in ("beta", "alpha", "gamma"):
        if kind == "model":
            ModelVersionFactory(model__organization=organization, model__name=name)
        else:
            {"dataset": DatasetFactory, "workspace": WorkspaceFactory}[kind](organization=organization, name=name)

    def names(**parameters):
        html = owner_page.get(reverse(f"{kind}_list"), parameters).content.decode()
        found = re.findall(r'class="stretched" href="[^"]+">(\w+)</a>', html)
        return [name for name in found if name != customer.workspace.name]

    assert names() == names(sort="unknown", q=" ") == ["alpha", "beta", "gamma"]
    assert names(sort="newest") == ["gamma", "alpha", "beta"]
    assert names(sort="oldest", q="A") == ["beta", "alpha", "gamma"]
    assert names(q="LPH") == ["alpha"]
    assert names(q="nothing") == []
    # % is no wildcard: no name contains it.
    assert "Nothing has this name" in owner_page.get(reverse(f"{kind}_list"), {"q": "a%"}).content.decode()
