"""Roles and their capabilities. Pure data. Views and services check capabilities, never roles."""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """A member's role in one organization."""

    OWNER = "owner"
    MEMBER = "member"
    BILLING = "billing"
    VIEWER = "viewer"


class Capability(enum.StrEnum):
    """A kind of action that a role may allow."""

    VIEW = "view"
    """See jobs, datasets, workspaces, images, the wallet's balance and receipts."""
    STORE = "store"
    """Create, change, share and delete what the organization stores: datasets, models, workspaces and their files,
    secrets, and its own images with the credentials of their registries."""
    RUN = "run"
    """Quote, buy, cancel and rerun."""
    PAY = "pay"
    """Top up, see and download every payment."""
    MANAGE = "manage"
    """Activate and deactivate the service; manage members, their roles and the organization's settings."""


CAPABILITIES: dict[Role, frozenset[Capability]] = {
    Role.OWNER: frozenset(Capability),
    Role.MEMBER: frozenset({Capability.VIEW, Capability.STORE, Capability.RUN}),
    Role.BILLING: frozenset({Capability.VIEW, Capability.PAY}),
    Role.VIEWER: frozenset({Capability.VIEW}),
}


def allows(role: str, capability: Capability) -> bool:
    """Return whether `role` allows `capability`."""
    return capability in CAPABILITIES[Role(role)]
