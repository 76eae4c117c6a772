"""Find the open jobs that use a version of a dataset or model, a workspace, image or secret, before it is deleted.

`storage` may not import the packages above it, so each of them registers a finder. A finder counts every job that may
still read or write, from the moment it is ordered. `reader` is the primary key of the organization whose
user sees the message: jobs of other organizations that use a shared dataset are not named.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from django.utils.translation import gettext_lazy as _

from storage.errors import InUse


class Finder(Protocol):
    """Returns the open jobs that use any of these objects, given by primary keys.

    `versions` are those of datasets, `models` those of models.
    """

    def __call__(
        self,
        *,
        reader: int | None,
        versions: Collection[int],
        models: Collection[int],
        workspaces: Collection[int],
        images: Collection[int],
        secrets: Collection[int],
    ) -> list[str]:
        """Return the jobs as users of `reader` see them, each with its latest end, oldest first."""
        ...


_finders: list[Finder] = []


def register(finder: Finder) -> None:
    """Add a finder. Safe to repeat."""
    if finder not in _finders:
        _finders.append(finder)


def jobs_using(
    *,
    reader: int | None,
    versions: Collection[int] = (),
    models: Collection[int] = (),
    workspaces: Collection[int] = (),
    images: Collection[int] = (),
    secrets: Collection[int] = (),
) -> list[str]:
    """Return the open jobs that use any of them, as users of `reader` see them."""
    used = {"versions": versions, "models": models, "workspaces": workspaces, "images": images, "secrets": secrets}
    return [name for finder in _finders for name in finder(reader=reader, **used)]


def require_unused(
    *,
    reader: int,
    versions: Collection[int] = (),
    models: Collection[int] = (),
    workspaces: Collection[int] = (),
    images: Collection[int] = (),
    secrets: Collection[int] = (),
) -> None:
    """Raise InUse with the open jobs that use any of them, and until when.

    Call it with the organization's quota and the dataset versions locked. Placing an order locks the same rows, so
    orders wait for the deletion.
    """
    names = jobs_using(
        reader=reader, versions=versions, models=models, workspaces=workspaces, images=images, secrets=secrets
    )
    if names:
        sentence = _("%(names)s uses this and has not ended. Wait for it to end, or cancel it first.")
        if len(names) > 1:
            sentence = _("%(names)s use this and have not ended. Wait for them to end, or cancel them first.")
        raise InUse(sentence % {"names": ", ".join(names)})
