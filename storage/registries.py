"""Credentials of customers' image registries, stored encrypted, and checks of images at their registries.

Neither pages nor the API show a password. A check raises InvalidInput if the registry refuses the credentials or does
not have the image. If the console cannot reach the registry, the check only returns a warning, because the cluster may
be able to reach it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import redis
from django.conf import settings
from django.core.cache import cache
from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _
from django.views.decorators.debug import sensitive_variables

from console.accounts.models import Organization, User
from console.accounts.services import record_audit_event
from console.core import encryption, optional_cache
from console.core.errors import InvalidInput, NotFound, Text
from storage import in_use, quota, registry_client
from storage.images import REFERENCE
from storage.in_use import ObjectIds
from storage.models import Image, Registry
from storage.registry_client import Credentials, Problem, RegistryError

USERNAME_LENGTH = 255
"""The length of the database column, in characters."""
MAX_PASSWORD_LENGTH = 8192
"""The longest password in characters. Cloud registries use tokens with up to a few thousand."""
MAX_REGISTRIES = 100
"""How many registries an organization may have, far more than any uses."""
ENCRYPTION_PURPOSE = b"trainyard registry credentials"
"""The key that encrypts passwords is derived from this purpose (`console.core.encryption`). If it changes, stored
passwords can no longer be decrypted."""
HOST = re.compile(r"(?=.{1,255}\Z)[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?")
"""A registry's host name or IPv4 address, with an optional port. The database column has 255 characters."""
QUOTE_SECONDS = 6.0
"""How long a check may take while a quote is made: the customer's order form waits for it."""
MAX_CONCURRENT_CHECKS = 3
"""How many checks of one organization may run at once in all web processes. Each holds a thread that serves pages."""
CACHE_SECONDS = 60
"""How long a digest is cached. The order form makes a new quote after each change, and should not ask the registry each
time."""


@dataclass(frozen=True)
class CheckResult:
    """What a check found: the image's digest, or a warning that nothing was checked.

    Both are empty if checks are turned off, and after a successful check of credentials, which has no digest.
    """

    digest: str = ""
    warning: Text = ""


def registries_for(organization: Organization) -> QuerySet[Registry]:
    """Return the organization's registries, sorted by host."""
    return Registry.objects.filter(organization=organization).order_by("host")


def registry_named(organization: Organization, host: str) -> Registry:
    """Return the organization's registry with this host. Raises NotFound."""
    # An invalid host, which comes from a URL, is not looked up: PostgreSQL refuses NUL characters.
    registry = registries_for(organization).filter(host=host.lower()).first() if HOST.fullmatch(host.lower()) else None
    if registry is None:
        raise NotFound
    return registry


@sensitive_variables("password")
def save_registry(
    *,
    organization: Organization,
    host: str,
    username: str = "",
    password: str | None = "",
    user: User | None = None,
) -> Registry:
    """Store a registry with its credentials, or change it. Raises InvalidInput.

    If `password` is None, the stored one is kept. If it is empty, the registry has none.
    """
    host = host.strip().lower()
    if not HOST.fullmatch(host):
        sentence = _("Enter only the registry host, for example registry.example.com or registry.example.com:5000.")
        raise InvalidInput(fields={"host": sentence})
    # Basic authentication (HTTP) sends user name and password with a colon between them.
    if len(username) > USERNAME_LENGTH or not username.isprintable() or ":" in username:
        sentence = _("The user name must have at most %(most)d characters, without colons.")
        raise InvalidInput(fields={"username": sentence % {"most": USERNAME_LENGTH}})
    if len(password or "") > MAX_PASSWORD_LENGTH or not (password or "").isprintable():
        sentence = _("The password must be one line of at most %(most)d characters.")
        raise InvalidInput(fields={"password": sentence % {"most": MAX_PASSWORD_LENGTH}})
    values: dict[str, object] = {"username": username}
    if password is not None:
        values["secret"] = encryption.encrypt(password, purpose=ENCRYPTION_PURPOSE) if password else b""
    with transaction.atomic():
        quota.lock(organization)  # concurrent calls wait here, so they cannot exceed MAX_REGISTRIES together
        if registries_for(organization).exclude(host=host).count() >= MAX_REGISTRIES:
            sentence = _("Your organization has reached its limit of %(most)d registries. Delete one first.")
            raise InvalidInput(fields={"host": sentence % {"most": MAX_REGISTRIES}})
        registry, _created = Registry.objects.update_or_create(organization=organization, host=host, defaults=values)
        record_audit_event(organization=organization, actor=user, action="registry.saved", target=host)
    return registry


def delete_registry(*, registry: Registry, user: User | None = None) -> None:
    """Delete a registry with its credentials. Raises InUse while an open job needs an image from it."""
    organization = registry.organization
    with transaction.atomic():
        quota.lock(organization)  # orders lock it too, so they wait for this deletion
        images = Image.objects.filter(organization=organization, reference__startswith=f"{registry.host}/")
        in_use.require_unused(
            ObjectIds(images=list(images.values_list("pk", flat=True))), viewer_organization_id=organization.pk
        )
        if Registry.objects.filter(pk=registry.pk).delete()[0]:
            record_audit_event(organization=organization, actor=user, action="registry.deleted", target=registry.host)


def registry_for(*, organization: Organization, reference: str) -> Registry | None:
    """Return the organization's registry that an image reference names; None if it is not stored."""
    return Registry.objects.filter(organization=organization, host=reference.partition("/")[0].lower()).first()


def password_of(registry: Registry) -> str:
    """Return the decrypted password; empty if there is none, or if it can no longer be decrypted."""
    if not registry.secret:
        return ""
    return encryption.decrypt(registry.secret, purpose=ENCRYPTION_PURPOSE) or ""


# --- Checks -----------------------------------------------------------------------------------------------------------


@sensitive_variables("password")
def check_registry(*, organization: Organization, host: str, username: str, password: str | None) -> CheckResult:
    """Check credentials before they are saved. If `password` is None, check the stored one. Raises InvalidInput.

    Do not call it in a database transaction, because it sends requests to the registry.
    """
    host = host.strip().lower()
    if not (settings.REGISTRY_CHECKS and username and HOST.fullmatch(host)):
        # Without a user name there is nothing to check. An invalid host is refused when the registry is saved.
        return CheckResult()
    if password is None:
        stored = registries_for(organization).filter(host=host).first()
        password = password_of(stored) if stored else ""
    try:
        with _limit_concurrent_checks(organization, "host"):
            registry_client.check_login(host, Credentials(username, password))
    except RegistryError as error:
        if error.problem is Problem.UNAUTHORIZED:
            sentence = _("The registry %(host)s refused this user name and password.")
            raise InvalidInput(fields={"password": sentence % {"host": host}}) from None
        return CheckResult(warning=_warning(error.problem, host))
    return CheckResult()


@sensitive_variables("password")
def check_image(*, organization: Organization, reference: str, username: str = "", password: str = "") -> CheckResult:
    """Check that a registry has an image, before the image is saved. Raises InvalidInput.

    Without a user name, the stored credentials are used. Do not call it in a database transaction, because it sends
    requests to the registry.
    """
    if not (settings.REGISTRY_CHECKS and REFERENCE.fullmatch(reference)):
        return CheckResult()  # an invalid reference is refused when the image is saved
    credentials = Credentials(username, password) if username else _credentials(organization, reference)
    try:
        with _limit_concurrent_checks(organization, "reference"):
            return CheckResult(digest=registry_client.digest_of(reference, credentials))
    except RegistryError as error:
        if sentence := _refusal(error.problem, reference, has_credentials=credentials is not None):
            raise InvalidInput(fields={"reference": sentence}) from None
        return CheckResult(warning=_warning(error.problem, reference.partition("/")[0]))


def current_digest(*, organization: Organization, image: Image) -> str:
    """Return the digest of an image for an order; empty if the image is built-in, or the registry cannot be reached.

    Raises InvalidInput. Do not call it in a database transaction, because it sends requests to the registry.
    """
    if image.is_builtin or not settings.REGISTRY_CHECKS:
        return ""
    reference = image.reference
    # A hash, because a reference may have 500 characters, and Django warns of cache keys with more than 250.
    reference_sha256 = hashlib.sha256(f"{organization.pk} {reference}".encode()).hexdigest()
    key = f"image-digest:{reference_sha256}"
    cached = optional_cache.get(key)
    if isinstance(cached, str):
        return cached
    credentials = _credentials(organization, reference)
    try:
        with _limit_concurrent_checks(organization, "image"):
            digest = registry_client.digest_of(reference, credentials, seconds=QUOTE_SECONDS)
    except RegistryError as error:
        if sentence := _refusal(error.problem, reference, has_credentials=credentials is not None):
            raise InvalidInput(fields={"image": sentence}) from None
        digest = ""  # cached too, so that the order form does not wait for the registry after each change
    except redis.RedisError:  # without Redis no check may run, but orders must not fail
        return ""
    optional_cache.put(key, digest, CACHE_SECONDS)
    return digest


@contextmanager
def _limit_concurrent_checks(organization: Organization, field: str) -> Iterator[None]:
    """Occupy one of the organization's MAX_CONCURRENT_CHECKS keys in the cache during the block.

    Raises InvalidInput for `field` if none is free, and RedisError if Redis does not answer.
    """
    keys = [f"registry-check:{organization.pk}:{number}" for number in range(MAX_CONCURRENT_CHECKS)]
    # The timeout frees the key of a process that died. It is twice TOTAL_SECONDS, as resolving names takes extra time.
    key = next((key for key in keys if cache.add(key, 1, timeout=int(2 * registry_client.TOTAL_SECONDS))), None)
    if key is None:
        raise InvalidInput(fields={field: _("Other checks of registries are running. Try again in a few seconds.")})
    try:
        yield
    finally:
        cache.delete(key)


def _credentials(organization: Organization, reference: str) -> Credentials | None:
    """Return the stored credentials for an image reference; None if there are none."""
    registry = registry_for(organization=organization, reference=reference)
    return Credentials(registry.username, password_of(registry)) if registry and registry.username else None


def _refusal(problem: Problem, reference: str, *, has_credentials: bool) -> Text:
    """Return a sentence on why the registry refused the image; empty if `problem` is no refusal but a failed check."""
    host = reference.partition("/")[0]
    if problem is Problem.NO_IMAGE:
        return _("The registry has no image %(reference)s. Check its name and tag.") % {"reference": reference}
    if problem is Problem.UNAUTHORIZED and has_credentials:
        sentence = _("The registry %(host)s refused the user name and password, or they may not read this image.")
        return sentence % {"host": host}
    if problem is Problem.UNAUTHORIZED:
        sentence = _("The registry %(host)s needs a user name and password, or has no image of this name.")
        return sentence % {"host": host}
    return ""


def _warning(problem: Problem, host: str) -> Text:
    """Return a sentence on why nothing was checked."""
    if problem is Problem.FORBIDDEN_ADDRESS:
        sentence = _("The registry %(host)s is not at a public HTTPS address, so the console did not check it.")
    elif problem is Problem.INVALID_ANSWER:
        sentence = _("%(host)s did not answer as a registry does, so nothing was checked. Check the host.")
    else:
        sentence = _("The console could not reach the registry %(host)s, so nothing was checked. Check the host.")
    return sentence % {"host": host}
