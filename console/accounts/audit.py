"""Entries of the audit log about a person's own log-in: sessions, passwords, second factors, single sign-on.

Each event is written to the log of every organization of the person, because owners must see how members log in.
allauth sends a signal for each event; the receivers of this module write the entries.
"""

from __future__ import annotations

from typing import Any

from allauth.account import signals as account_signals
from allauth.mfa import signals as factor_signals
from allauth.socialaccount import signals as provider_signals
from celery import shared_task
from django.contrib.auth.signals import user_login_failed
from django.dispatch import receiver

from console.accounts import selectors
from console.accounts.models import ACCOUNT_ACTION_PREFIX, MAX_TARGET_LENGTH, AuditEvent, Membership, User
from console.core.enqueue import send
from console.observability import context


def record_for_person(*, user: User, action: str, target: str = "", address: str | None = None) -> None:
    """Write an entry for each organization of the person. If there is none, write one entry of no organization.

    `address` is the IP address from which the person acted; None: that of the current request.
    """
    memberships = Membership.objects.filter(user=user)
    organization_ids: list[int | None] = [*memberships.values_list("organization_id", flat=True)]
    AuditEvent.objects.bulk_create(
        AuditEvent(
            organization_id=organization_id,
            actor=user,
            action=f"{ACCOUNT_ACTION_PREFIX}{action}",
            target=target[:MAX_TARGET_LENGTH],
            address=address or context.fields().get("client"),
        )
        for organization_id in organization_ids or [None]
    )


@receiver(account_signals.user_logged_in)
def _record_log_in(user: User, **_extra: Any) -> None:
    record_for_person(user=user, action="logged_in")


@receiver(user_login_failed)
def _send_failed_log_in(credentials: dict[str, Any], **_extra: Any) -> None:
    # A task looks for the account, so that the response time does not reveal whether the account exists. allauth names
    # the credential `email`; other code that calls Django's `authenticate` may name it `username`.
    email = str(credentials.get("email") or credentials.get("username") or "")
    send(record_failed_log_in, email, context.fields().get("client"))


@shared_task(name="console.accounts.audit.record_failed_log_in")
def record_failed_log_in(email: str, address: str | None) -> None:
    """Write the entries of a log-in with a wrong password, if the email has an account. `address`: the client's IP."""
    user = selectors.user_of_address(email=email)
    if user is not None:
        record_for_person(user=user, action="log_in_failed", address=address)


@receiver(factor_signals.authentication_failed)
def _record_failed_factor(user: User, **_extra: Any) -> None:
    record_for_person(user=user, action="factor_failed")


@receiver([account_signals.password_changed, account_signals.password_set, account_signals.password_reset])
def _record_password(user: User, **_extra: Any) -> None:
    record_for_person(user=user, action="password_changed")


@receiver([account_signals.email_added, account_signals.email_removed])
def _record_address_added_or_removed(user: User, email_address: Any, **_extra: Any) -> None:
    record_for_person(user=user, action="addresses_changed", target=email_address.email)


@receiver(account_signals.email_changed)
def _record_address_changed(user: User, to_email_address: Any, **_extra: Any) -> None:
    record_for_person(user=user, action="addresses_changed", target=to_email_address.email)


@receiver(factor_signals.authenticator_added)
def _record_factor_added(user: User, authenticator: Any, **_extra: Any) -> None:
    record_for_person(user=user, action="factor_added", target=str(authenticator))


@receiver(factor_signals.authenticator_removed)
def _record_factor_removed(user: User, authenticator: Any, **_extra: Any) -> None:
    record_for_person(user=user, action="factor_removed", target=str(authenticator))


@receiver(factor_signals.authenticator_reset)  # allauth sends it only for new recovery codes
def _record_renewed_codes(user: User, **_extra: Any) -> None:
    record_for_person(user=user, action="codes_renewed")


@receiver(provider_signals.social_account_added)
def _record_provider_connected(sociallogin: Any, **_extra: Any) -> None:
    record_for_person(user=sociallogin.user, action="provider_connected", target=sociallogin.account.provider)


@receiver(provider_signals.social_account_removed)
def _record_provider_disconnected(socialaccount: Any, **_extra: Any) -> None:
    record_for_person(user=socialaccount.user, action="provider_disconnected", target=socialaccount.provider)
