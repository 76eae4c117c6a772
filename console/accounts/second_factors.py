"""Second factors of a log-in: authenticator apps, passkeys and recovery codes, by allauth's `mfa`.

The keys of authenticator apps and recovery codes are encrypted in the database. The number of codes that can be tried
is limited by account: an attacker who tries codes knows the password already, and may have many IP addresses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from allauth.core import context, ratelimit
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.mfa.base.forms import AuthenticateForm, ReauthenticateForm
from allauth.mfa.models import Authenticator
from allauth.mfa.webauthn.forms import AddWebAuthnForm
from django.conf import settings
from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from console.accounts.models import Membership, ServiceAccount, User
from console.core import encryption
from console.installation.selectors import installation

ENCRYPTION_PURPOSE = b"trainyard second factors"
"""The key that encrypts apps' keys and recovery codes is derived from this purpose (`console.core.encryption`). With
another purpose, stored ones cannot be decrypted."""
FACTORS = (Authenticator.Type.TOTP, Authenticator.Type.WEBAUTHN)
"""The types that protect a log-in. Recovery codes are not among them, because they only replace a lost factor."""


class SecondFactorAdapter(DefaultMFAAdapter):  # type: ignore[misc]  # allauth publishes no types
    """Names this console in authenticator apps, and encrypts their keys."""

    error_messages = DefaultMFAAdapter.error_messages | {
        "too_many_codes": gettext_lazy("Too many wrong codes. Wait 15 minutes, then try again.")
    }

    def get_totp_issuer(self) -> str:
        """Return this console's name, as authenticator apps show it."""
        return installation().name

    def get_public_key_credential_rp_entity(self) -> dict[str, str]:
        """Return the host that passkeys belong to, and this console's name."""
        return {**super().get_public_key_credential_rp_entity(), "name": installation().name}

    def encrypt(self, text: str) -> str:
        """Return the encrypted text."""
        return encryption.encrypt(text, purpose=ENCRYPTION_PURPOSE).decode()

    def decrypt(self, encrypted_text: str) -> str:
        """Return the text. Raises ValidationError if no key decrypts it, so that no code is accepted then."""
        text = encryption.decrypt(encrypted_text.encode(), purpose=ENCRYPTION_PURPOSE)
        if not text:
            raise self.validation_error("incorrect_code")
        return text

    def generate_authenticator_name(self, user: User, type: Authenticator.Type) -> str:  # noqa: A002  # allauth's name
        """Return the suggested name of a new passkey."""
        number = Authenticator.objects.filter(user=user, type=type).count() + 1
        return _("Passkey %(number)d") % {"number": number}


class _LimitedByAccount:
    """Refuses codes after too many wrong ones for one account. allauth's own limit counts by IP address."""

    user: User

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["code"].widget.attrs |= {"inputmode": "numeric", "autofocus": True}  # type: ignore[attr-defined]  # allauth's

    def clean_code(self) -> str:
        """Return the code. Raises ValidationError if it is wrong or already used, and after too many wrong codes."""
        key = f"second-factor:{self.user.pk}"
        if not ratelimit.consume(context.request, action="second_factor", key=key):
            raise SecondFactorAdapter().validation_error("too_many_codes")
        code: str = super().clean_code()  # type: ignore[misc]  # a method of the form that this class is mixed into
        ratelimit.clear(context.request, action="second_factor", key=key)
        return code


class CodeForm(_LimitedByAccount, AuthenticateForm):  # type: ignore[misc]  # allauth publishes no types
    """The form that asks for a code at log-in: from the authenticator app, or a recovery code."""


class ConfirmationForm(_LimitedByAccount, ReauthenticateForm):  # type: ignore[misc]  # as above
    """The form that asks for a code before a person changes their own account."""


class PasskeyForm(AddWebAuthnForm):  # type: ignore[misc]  # as above
    """The form of a new passkey. A passkey with `passwordless`, the default, replaces the password at log-in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["name"].label = _("Name")
        self.fields["name"].max_length = 100
        self.fields["name"].help_text = _("For example the device that keeps it.")
        self.fields["passwordless"].label = _("Log in with this passkey alone")
        self.fields["passwordless"].help_text = _(
            "The device checks your fingerprint, face or PIN. Otherwise the passkey is asked for after the password."
        )
        self.fields["passwordless"].initial = True


def is_protected(user: User) -> bool:
    """Return whether the person has set up a second factor, which each log-in then needs."""
    return bool(Authenticator.objects.filter(user=user, type__in=FACTORS).exists())


def is_missing(membership: Membership) -> bool:
    """Return whether the organization requires a second factor that the member has not set up.

    Service accounts cannot log in, so they need none.
    """
    if not membership.organization.requires_second_factor or is_protected(membership.user):
        return False
    return not ServiceAccount.objects.filter(membership=membership).exists()


def may_administer(user: User) -> bool:
    """Return whether the person is an administrator, with a second factor if the installation requires one."""
    return user.is_active and user.is_staff and not is_missing_for_staff(user)


def is_missing_for_staff(user: User) -> bool:
    """Return whether the installation requires a second factor that this administrator has not set up."""
    return bool(settings.STAFF_SECOND_FACTOR) and user.is_staff and not is_protected(user)


def protected_users(user_ids: Iterable[int]) -> set[int]:
    """Return the ids of those users who have a second factor."""
    return set(Authenticator.objects.filter(user__in=user_ids, type__in=FACTORS).values_list("user", flat=True))


def reset(*, user: User) -> int:
    """Remove all second factors of a person who lost them. Returns how many there were."""
    return int(Authenticator.objects.filter(user=user).delete()[0])


def count_unused_codes(factors: Iterable[Authenticator]) -> int | None:
    """Return how many recovery codes among a person's factors are unused; None without codes."""
    for factor in factors:
        if factor.type == Authenticator.Type.RECOVERY_CODES:
            try:
                return len(factor.wrap().get_unused_codes())
            except ValidationError:  # SECRET_KEY was replaced without a fallback
                return 0
    return None
