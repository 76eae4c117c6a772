"""The image catalogue: built-in images, and those that organizations register.

Rows are never deleted, because jobs reference them; a deleted image is inactive. Callers have checked that the user may
do this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop

from console.accounts.models import Organization, User
from console.accounts.services import record
from console.core.errors import NotFound, Text
from runtime.specs import Framework
from storage import in_use, quota
from storage.catalog import name_taken_error, translate_name_conflict, validate_texts
from storage.models import Image

TITLE_LIMIT = 100
"""Characters of a title; the column holds as many."""
REFERENCE = re.compile(
    r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)+"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
"""`host/name:tag` or `host/name@sha256:...`, as in the OCI distribution specification, always with the host."""
BUILTIN_IMAGES = (
    ("pytorch", "PyTorch", gettext_noop("PyTorch with torchvision and TensorBoard."), (Framework.PYTORCH,)),
    ("tensorflow", "TensorFlow", gettext_noop("TensorFlow with Keras and TensorBoard."), (Framework.TENSORFLOW,)),
    (
        "horovod",
        "Horovod",
        gettext_noop("Horovod with PyTorch and torchvision, over Gloo or MPI."),
        (Framework.HOROVOD, Framework.PYTORCH),
    ),
    (
        "horovod-tensorflow",
        "Horovod for TensorFlow",
        gettext_noop("Horovod with TensorFlow, over Gloo or MPI."),
        (Framework.HOROVOD, Framework.TENSORFLOW),
    ),
)


def create_image(
    *,
    organization: Organization,
    name: str,
    title: str,
    frameworks: Sequence[str],
    reference: str,
    description: str = "",
    user: User | None = None,
) -> Image:
    """Register an image from the organization's own registry. Raises InvalidInput, NameTaken.

    The name of a deleted image can be used again. Its row, which earlier jobs reference, is then reused.
    """
    columns = _image_columns(title, frameworks, reference, description, name=name)
    if Image.objects.filter(organization=None, name=name).exists():
        raise name_taken_error()
    with translate_name_conflict(), transaction.atomic():
        deleted = Image.objects.select_for_update().filter(organization=organization, name=name, is_active=False)
        image = deleted.first() or Image(organization=organization, name=name)
        for column, value in columns.items():
            setattr(image, column, value)
        image.is_active = True
        image.save()
        record(organization=organization, actor=user, action="image.created", target=name)
    return image


def update_image(
    *,
    image: Image,
    title: str,
    frameworks: Sequence[str],
    reference: str,
    description: str = "",
    user: User | None = None,
) -> Image:
    """Change an organization's own image. Raises InvalidInput, NotFound, and InUse if an open job would run it."""
    organization = _owner_of(image)
    columns = _image_columns(title, frameworks, reference, description)
    with transaction.atomic():
        quota.lock(organization)
        if (reference, columns["frameworks"]) != (image.reference, image.frameworks):
            in_use.require_unused(reader=organization.pk, images=[image.pk])
        for column, value in columns.items():
            setattr(image, column, value)
        image.save(update_fields=list(columns))
        record(organization=organization, actor=user, action="image.changed", target=image.name)
    return image


def delete_image(*, image: Image, user: User | None = None) -> None:
    """Deactivate an organization's own image. Safe to repeat. Raises NotFound, and InUse while a job needs it."""
    organization = _owner_of(image)
    with transaction.atomic():
        quota.lock(organization)
        in_use.require_unused(reader=organization.pk, images=[image.pk])
        if Image.objects.filter(pk=image.pk, is_active=True).update(is_active=False):
            record(organization=organization, actor=user, action="image.deleted", target=image.name)


def _image_columns(
    title: str, frameworks: Sequence[str], reference: str, description: str, *, name: str | None = None
) -> dict[str, Any]:
    """Return the validated values of an image's columns. `name` is validated for a new image. Raises InvalidInput."""
    errors: dict[str, Text] = {}
    if not REFERENCE.fullmatch(reference):
        errors["reference"] = _("Enter host, name and tag, for example registry.example.com/team/train:1.2.")
    if not frameworks or not set(frameworks) <= set(Framework):
        errors["frameworks"] = _("Choose at least one of pytorch, horovod and tensorflow.")
    if not title.strip() or len(title) > TITLE_LIMIT:
        errors["title"] = _("The title must have 1 to 100 characters.")
    validate_texts(name, description, errors)
    return {
        "title": title.strip(),
        "description": description,
        "frameworks": [framework.value for framework in Framework if framework in frameworks],
        "reference": reference,
    }


def _owner_of(image: Image) -> Organization:
    if image.organization is None:
        raise NotFound
    return image.organization


def ensure_builtin_images() -> list[Image]:
    """Create the built-in images where they are missing, and return them. Changes by an administrator stay."""
    return [
        Image.objects.get_or_create(
            organization=None,
            name=name,
            defaults={
                "title": str(title),
                "description": str(text),
                "frameworks": [framework.value for framework in frameworks],
            },
        )[0]
        for name, title, text, frameworks in BUILTIN_IMAGES
    ]
