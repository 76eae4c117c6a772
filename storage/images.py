"""The images that jobs can use: built-in ones, and those that organizations register.

Rows are never deleted, because jobs reference them. A deleted image is an inactive row. Callers must have checked that
the user may do this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop

from console.accounts.models import Organization, User
from console.accounts.services import record_audit_event
from console.core.errors import NotFound, Text
from runtime.specs import Framework
from storage import in_use, quota
from storage.catalog import name_taken_error, translate_name_conflict, validate_texts
from storage.in_use import ObjectIds
from storage.models import Image

TITLE_LIMIT = 100
"""The length of the database column of titles, in characters."""
REFERENCE_LIMIT = 500
"""The length of the database column of references, in characters."""
REFERENCE = re.compile(
    r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)+"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
"""An image reference `host/name:tag` or `host/name@sha256:...`, as in the OCI distribution specification. The host must
be given; there is no default registry."""
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
"""The name, title, description and frameworks of each built-in image. `runtime.images` builds them."""


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

    The name of a deleted image can be used again. The row of the deleted image is then changed and activated.
    """
    columns = _image_columns(title, frameworks, reference, description, name=name)
    if Image.objects.filter(organization=None, name=name).exists():  # a built-in image has this name
        raise name_taken_error()
    with translate_name_conflict(), transaction.atomic():
        deleted = Image.objects.select_for_update().filter(organization=organization, name=name, is_active=False)
        image = deleted.first() or Image(organization=organization, name=name)
        for column, value in columns.items():
            setattr(image, column, value)
        image.is_active = True
        image.save()
        record_audit_event(organization=organization, actor=user, action="image.created", target=name)
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
        quota.lock(organization)  # orders lock it too, so they wait for this change
        if (reference, columns["frameworks"]) != (image.reference, image.frameworks):
            in_use.require_unused(ObjectIds(images=[image.pk]), viewer_organization_id=organization.pk)
        for column, value in columns.items():
            setattr(image, column, value)
        image.save(update_fields=list(columns))
        record_audit_event(organization=organization, actor=user, action="image.changed", target=image.name)
    return image


def delete_image(*, image: Image, user: User | None = None) -> None:
    """Deactivate an organization's own image. Safe to repeat. Raises NotFound, and InUse while a job needs it."""
    organization = _owner_of(image)
    with transaction.atomic():
        quota.lock(organization)  # as in `update_image`
        in_use.require_unused(ObjectIds(images=[image.pk]), viewer_organization_id=organization.pk)
        if Image.objects.filter(pk=image.pk, is_active=True).update(is_active=False):
            record_audit_event(organization=organization, actor=user, action="image.deleted", target=image.name)


def _image_columns(
    title: str, frameworks: Sequence[str], reference: str, description: str, *, name: str | None = None
) -> dict[str, Any]:
    """Validate the values of an image, and return them by column. `name` is None for an existing image.

    Raises InvalidInput.
    """
    errors: dict[str, Text] = {}
    if not REFERENCE.fullmatch(reference):
        errors["reference"] = _("Enter host, name and tag, for example registry.example.com/team/train:1.2.")
    elif len(reference) > REFERENCE_LIMIT:
        errors["reference"] = _("Use at most 500 characters.")
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
    """Return the organization that registered an image. Raises NotFound for a built-in image, which nobody changes."""
    if image.organization is None:
        raise NotFound
    return image.organization


def ensure_builtin_images() -> list[Image]:
    """Return the built-in images; create missing ones. Existing ones keep the changes of an administrator."""
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
