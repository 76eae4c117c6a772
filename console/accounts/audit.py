"""Entries of the audit log about a person's own log-in: sessions, passwords, second factors, single sign-on.

Each event is written to the log of every organization of the person, because owners must see how members log in.
allauth sends a signal for each event; the receivers of this module write the entries.
"""

from __future__ import annotations

from typing import Any

from allauth.account import signals as account
from allauth.mfa import signals as factors
from allauth.socialaccount import signals as sign_on
from celery import shared_task
from django.contrib.auth.signals import user_login_failed
from django.dispatch import receiver

from console.accounts.models import AuditEvent, Membership, User
from console.core.enqueue import send
from console.observability import context

PREFIX = "account."
"""The `action` of every entry of this module begins with this prefix."""


def record_for_person(*, user: User, action: str, target: str = "", address: str | None = None) -> None:
    """Write an entry for each organization of the person, or one without an organization."""
    memberships = Membership.objects.filter(user=user)
    organizations: list[int | None] = [*memberships.values_list("organization_id", flat=True)]
    AuditEvent.objects.bulk_create(
        AuditEvent(
            organization_id=organization,
            actor=user,
            action=f"{PREFIX}{action}",
            target=target[:128],
            address=address or context.fields().get("client"),
        )
        for organization in organizations or [None]
    )


@receiver(account.user_logged_in)
def _logged_in(user: User, **_extra: Any) -> None:
    record_for_person(user=user, action="logged_in")


@receiver(user_login_failed)
def _log_in_failed(credentials: dict[str, Any], **_extra: Any) -> None:
    # A task looks for the account, so that the response time does not reveal whether the account exists.
    email = str(credentials.get("email") or credentials.get("username") or "")
    send(record_failed_log_in, email, context.fields().get("client"))


@shared_task(name="console.accounts.audit.record_failed_log_in")
def record_failed_log_in(email: str, address: str | None) -> None:
    """Write the entries of a log-in with a wrong password, if the address has an account."""
    user = User.objects.filter(email=email.lower()).first()
    if user is not None:
        record_for_person(user=user, action="log_in_failed", address=address)


@receiver(factors.authentication_failed)
def _factor_failed(user: User, **_extra: Any) -> None:
    record_for_person(user=user, action="factor_failed")


@receiver([account.password_changed, account.password_set, account.password_reset])
def _password_changed(user: User, **_extra: Any) -> None:
    record_for_person(user=user, action="password_changed")


@receiver([account.email_added, account.email_removed])
def _addresses_changed(user: User, email_address: Any, **_extra: Any) -> None:
    record_for_person(user=user, action="addresses_changed", target=email_address.email)


@receiver(account.email_changed)
def _address_changed(user: User, to_email_address: Any, **_extra: Any) -> None:
    record_for_person(user=user, action="addresses_changed", target=to_email_address.email)


@receiver(factors.authenticator_added)
def _factor_added(user: User, authenticator: Any, **_extra: Any) -> None:
    record_for_person(user=user, action="factor_added", target=str(authenticator))


@receiver(factors.authenticator_removed)
def _factor_removed(user: User, authenticator: Any, **_extra: Any) -> None:
    record_for_person(user=user, action="factor_removed", target=str(authenticator))


@receiver(factors.authenticator_reset)  # allauth sends it only for new recovery codes
def _recovery_codes_renewed(user: User, **_extra: Any) -> None:
    record_for_person(user=user, action="codes_renewed")


@receiver(sign_on.social_account_added)
def _provider_connected(sociallogin: Any, **_extra: Any) -> None:
    record_for_person(user=sociallogin.user, action="provider_connected", target=sociallogin.account.provider)


@receiver(sign_on.social_account_removed)
def _provider_disconnected(socialaccount: Any, **_extra: Any) -> None:
    record_for_person(user=socialaccount.user, action="provider_disconnected", target=socialaccount.provider)
