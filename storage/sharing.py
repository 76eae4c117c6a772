"""Share datasets with other organizations, and publish datasets for everyone. Others can only read them.

For a share, the owner creates a code and gives it to somebody in the other organization, who enters it. Neither side
learns the other's name from the console; instead the owner gives the share a label. A code is random, and works once
within CODE_LIFETIME. Only its hash is stored. After a share is revoked, no new order can use the dataset, but jobs that
were already ordered still do.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from datetime import timedelta

from django.db import transaction
from django.db.models import Case, Exists, OuterRef, Prefetch, Q, QuerySet, Value, When, prefetch_related_objects
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from console.accounts.models import Organization, Quota, User
from console.accounts.services import record_audit_event
from console.core.errors import InvalidInput, NotFound
from storage import catalog, quota, selectors
from storage.errors import NameTaken
from storage.files import Readable
from storage.models import NAME_PATTERN, Dataset, DatasetShare, DatasetVersion

CODE_LIFETIME = timedelta(days=7)
"""How long a code can be entered. People may read the email with it some days later. Messages name the 7 days too."""
MAX_SHARES = 100
"""How many open shares a dataset may have, accepted or not. The page of the dataset lists them all."""
LABEL_LIMIT = 100
"""The length of a label's database column, in characters."""
OWN_RANK, SHARED_RANK, PUBLIC_RANK = 0, 1, 2
"""The `rank` of a dataset for an organization that may read it. Of several datasets with the same name, the
organization uses the one with the lowest rank."""
PUBLIC_OWNER_SLUG = "public.datasets"
"""The slug of the organization that owns the installation's own public datasets. It has no members. No customer's
organization can have this slug, because slugs that are made from names have no dots."""
INVALID_CODE = _("This code is not valid. Check it, or ask for a new one: a code works once and for 7 days.")


# --- Read -------------------------------------------------------------------------------------------------------------


def usable_datasets(organization: Organization) -> QuerySet[Dataset]:
    """Return the datasets that an organization may read, each with its `rank`. Several may have the same name."""
    shares = DatasetShare.objects.filter(dataset=OuterRef("pk"), recipient=organization, revoked_at=None)
    is_own, is_shared = Q(organization=organization), Exists(shares)
    return (
        Dataset.objects.filter(is_own | is_shared | Q(is_public=True), deleted_at=None)
        .annotate(
            rank=Case(
                When(is_own, then=Value(OWN_RANK)),
                When(is_shared, then=Value(SHARED_RANK)),
                default=Value(PUBLIC_RANK),
            )
        )
        .select_related("latest")
        .order_by("rank", "name", "pk")
    )


def usable_dataset_named(organization: Organization, name: str) -> Dataset:
    """Return the dataset that a name means to an organization: its own, else a shared one, else a public one.

    Raises NotFound.
    """
    dataset = usable_datasets(organization).filter(name=name).first() if NAME_PATTERN.match(name) else None
    if dataset is None:
        raise NotFound
    return dataset


def one_per_name(datasets: Iterable[Dataset]) -> list[Dataset]:
    """Return one of `usable_datasets` for each name: the first, which has the lowest rank and hides the others."""
    first_by_name: dict[str, Dataset] = {}
    for dataset in datasets:
        first_by_name.setdefault(dataset.name, dataset)
    return list(first_by_name.values())


def datasets_to_choose(organization: Organization) -> list[Dataset]:
    """Return the datasets that an organization may read, for a form.

    Each has its name, the number and size of its latest version, and the list `published`. The list has the versions
    that are not deleted, newest first, with number and time. It is empty if the latest version has the number 1, since
    the form then offers no choice.
    """
    datasets = one_per_name(
        usable_datasets(organization).only("organization_id", "name", "latest__number", "latest__size_bytes")
    )
    versions = DatasetVersion.objects.filter(deleted_at=None).only("dataset_id", "number", "published_at")
    for dataset in datasets:
        dataset.published = []
    prefetch_related_objects(
        [dataset for dataset in datasets if dataset.latest and dataset.latest.number > 1],
        Prefetch("versions", versions.order_by("-number"), to_attr="published"),
    )
    return datasets


def borrowed_datasets(organization: Organization) -> list[Dataset]:
    """Return the datasets of other organizations that an organization may read: shared and public ones."""
    own_names = Dataset.objects.filter(organization=organization, deleted_at=None).values("name")
    return one_per_name(usable_datasets(organization).exclude(organization=organization).exclude(name__in=own_names))


def open_shares(dataset: Dataset) -> QuerySet[DatasetShare]:
    """Return the shares of a dataset that were accepted or can still be accepted, and are not revoked."""
    is_open = Q(recipient__isnull=False) | Q(expires_at__gt=timezone.now())
    return dataset.shares.filter(is_open, revoked_at=None).order_by("-pk")


def share_of(dataset: Dataset, pk: int) -> DatasetShare:
    """Return the dataset's open share with this id. Raises NotFound."""
    share = open_shares(dataset).filter(pk=pk).first() if pk <= selectors.MAX_KEY else None
    if share is None:
        raise NotFound
    return share


# --- Share ------------------------------------------------------------------------------------------------------------


def create_share(*, dataset: Dataset, user: User | None, label: str) -> tuple[DatasetShare, str]:
    """Create a share; return the share and its code, which cannot be read again. Raises InvalidInput."""
    label = label.strip()
    if not label or len(label) > LABEL_LIMIT or "\0" in label:
        raise InvalidInput(fields={"label": _("Enter 1 to 100 characters that tell you who gets the code.")})
    code = secrets.token_urlsafe(24)
    with transaction.atomic():
        # Concurrent calls wait here, so they cannot exceed MAX_SHARES together.
        Dataset.objects.select_for_update().get(pk=dataset.pk)
        if open_shares(dataset).count() >= MAX_SHARES:
            raise InvalidInput(_("A dataset can have at most 100 shares. Revoke one first."))
        share = DatasetShare.objects.create(
            dataset=dataset,
            label=label,
            code_sha256=_hash(code),
            created_by=user,
            expires_at=timezone.now() + CODE_LIFETIME,
        )
        record_audit_event(organization=dataset.organization, actor=user, action="dataset.shared", target=dataset.name)
    return share, code


def accept_share(*, organization: Organization, user: User | None, code: str) -> Dataset:
    """Accept a share: the organization may then read the dataset of this code. Raises InvalidInput, NameTaken."""
    with transaction.atomic():
        # So that two codes for datasets of the same name cannot be accepted at once.
        quota.lock(organization)
        now = timezone.now()
        share = (
            DatasetShare.objects.select_for_update(of=("self",))
            .select_related("dataset")
            .filter(code_sha256=_hash(code.strip()), recipient=None, revoked_at=None, expires_at__gt=now)
            .filter(dataset__deleted_at=None)
            .first()
        )
        if share is None:
            raise InvalidInput(fields={"code": INVALID_CODE})
        dataset = share.dataset
        if dataset.organization_id == organization.pk:
            raise InvalidInput(fields={"code": _("This is your own dataset. Give the code to another organization.")})
        # Runs mount a dataset under its name, so an organization can use only one with each name. A share may hide a
        # public dataset, but neither the organization's own nor another shared one.
        same_name = usable_datasets(organization).filter(name=dataset.name).first()
        if same_name is not None and same_name.rank < PUBLIC_RANK:  # type: ignore[attr-defined]  # an annotation
            raise NameTaken(
                fields={"code": _("Your organization already has a dataset of this name. Remove it, then try again.")}
            )
        # Any other share of this name is of a deleted dataset, since a live one was refused above. Revoke it: if its
        # owner restored the dataset, two shared datasets would have one name.
        earlier = DatasetShare.objects.filter(recipient=organization, dataset__name=dataset.name, revoked_at=None)
        earlier.update(revoked_at=now)
        share.recipient, share.accepted_at = organization, now
        share.save(update_fields=["recipient", "accepted_at"])
        record_audit_event(organization=organization, actor=user, action="dataset.share_accepted", target=dataset.name)
        # Without an actor, because neither side learns the other's name.
        record_audit_event(
            organization=share.dataset.organization, actor=None, action="dataset.share_taken", target=dataset.name
        )
    return dataset


def revoke_share(*, share: DatasetShare, user: User | None) -> None:
    """End a share as the owner of the dataset: new orders can no longer use the dataset through it. Safe to repeat."""
    with transaction.atomic():
        if DatasetShare.objects.filter(pk=share.pk, revoked_at=None).update(revoked_at=timezone.now()):
            dataset = share.dataset
            record_audit_event(
                organization=dataset.organization, actor=user, action="dataset.share_revoked", target=dataset.name
            )


def leave_share(*, organization: Organization, user: User | None, name: str) -> None:
    """End the share through which an organization reads the dataset `name`. Raises NotFound.

    This works even if the organization's own dataset of this name hides the shared one.
    """
    if not NAME_PATTERN.match(name):
        raise NotFound
    with transaction.atomic():
        shares = DatasetShare.objects.filter(
            dataset__name=name, dataset__deleted_at=None, recipient=organization, revoked_at=None
        )
        if not shares.update(revoked_at=timezone.now()):
            raise NotFound
        record_audit_event(organization=organization, actor=user, action="dataset.share_left", target=name)


# --- Publish for everyone ---------------------------------------------------------------------------------------------


def set_public(*, dataset: Dataset, is_public: bool, actor: User | None) -> None:
    """Let every organization read a dataset, or end this, so that new orders of others need a share again.

    Only administrators may do this. Safe to repeat.
    """
    with transaction.atomic():
        rows = Dataset.objects.filter(pk=dataset.pk, deleted_at=None).exclude(is_public=is_public)
        if rows.update(is_public=is_public):
            action = "dataset.made_public" if is_public else "dataset.withdrawn"
            record_audit_event(organization=dataset.organization, actor=actor, action=action, target=dataset.name)


def has_public(name: str) -> bool:
    """Return whether the installation has a public dataset of this name."""
    return Dataset.objects.filter(
        organization__slug=PUBLIC_OWNER_SLUG, name=name, deleted_at=None, is_public=True
    ).exists()


def publish_public(*, name: str, stream: Readable, description: str = "") -> DatasetVersion:
    """Publish an archive as the next version of one of the installation's own public datasets.

    Raises as `catalog.create_dataset` and `catalog.publish_version`.
    """
    with transaction.atomic():
        owner, _created = Organization.objects.get_or_create(
            slug=PUBLIC_OWNER_SLUG, defaults={"name": "Public datasets"}
        )
        Quota.objects.get_or_create(organization=owner)
    dataset = selectors.datasets_for(owner).filter(name=name).first()
    if dataset is None:
        dataset = catalog.create_dataset(organization=owner, user=None, name=name, description=description)
    version = catalog.publish_version(dataset=dataset, user=None, stream=stream)
    set_public(dataset=dataset, is_public=True, actor=None)
    return version


def _hash(code: str) -> str:
    # A code from JSON may contain lone surrogates, which UTF-8 cannot encode; it then matches no share.
    return hashlib.sha256(code.encode(errors="replace")).hexdigest()
