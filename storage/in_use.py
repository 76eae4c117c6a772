"""Find the open jobs that use a dataset version, model version, workspace, image or secret, before it is deleted.

`storage` may not import `jobs`. Instead `jobs` registers a finder when Django starts. A job is open from its order to
its end. In all this time it may read or write these objects.

`viewer_organization_id` is the organization whose member sees the message. Jobs of other organizations may use a shared
dataset; the message does not show their names. None means that nobody sees the message.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from django.utils.translation import gettext_lazy as _

from storage.errors import InUse


@dataclass(frozen=True, kw_only=True)
class ObjectIds:
    """The ids of the objects whose users are looked for, by kind."""

    dataset_versions: Collection[int] = ()
    model_versions: Collection[int] = ()
    workspaces: Collection[int] = ()
    images: Collection[int] = ()
    secrets: Collection[int] = ()


class Finder(Protocol):
    """A function that finds the open jobs that use any of these objects."""

    def __call__(self, objects: ObjectIds, *, viewer_organization_id: int | None) -> list[str]:
        """Return a text for each of the oldest jobs, the oldest first: its name, and when it ends at the latest."""
        ...


_finders: list[Finder] = []


def register(finder: Finder) -> None:
    """Add a finder, which all functions below then use. Safe to repeat."""
    if finder not in _finders:
        _finders.append(finder)


def jobs_using(objects: ObjectIds, *, viewer_organization_id: int | None) -> list[str]:
    """Return the texts of all finders (`Finder`) for the open jobs that use any of these objects."""
    return [text for finder in _finders for text in finder(objects, viewer_organization_id=viewer_organization_id)]


def require_unused(objects: ObjectIds, *, viewer_organization_id: int) -> None:
    """Raise InUse if open jobs use any of these objects. The message names the jobs, and when they end at the latest.

    Call it in the transaction that deletes the object, with the organization's quota and the dataset versions locked.
    An order locks the same rows, so it waits for the deletion and then fails.
    """
    names = jobs_using(objects, viewer_organization_id=viewer_organization_id)
    if names:
        sentence = _("%(names)s uses this and has not ended. Wait for it to end, or cancel it first.")
        if len(names) > 1:
            sentence = _("%(names)s use this and have not ended. Wait for them to end, or cancel them first.")
        raise InUse(sentence % {"names": ", ".join(names)})
