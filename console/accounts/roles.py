"""Who may do what: the one table. PURE.

A view or service asks for a Capability, never for a role.
"""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """A member's role in one organization."""

    OWNER = "owner"
    MEMBER = "member"
    BILLING = "billing"
    VIEWER = "viewer"


class Capability(enum.StrEnum):
    """One kind of act."""

    VIEW = "view"
    """See jobs, datasets, workspaces, images, the wallet's balance and receipts."""
    STORE = "store"
    """Create, change and delete datasets, workspaces and their files, images of one's own."""
    RUN = "run"
    """Quote, buy, cancel and rerun."""
    PAY = "pay"
    """Top up, see and download every payment."""
    MANAGE = "manage"
    """Activate and deactivate services, members and roles, the organization's name."""


CAPABILITIES: dict[Role, frozenset[Capability]] = {
    Role.OWNER: frozenset(Capability),
    Role.MEMBER: frozenset({Capability.VIEW, Capability.STORE, Capability.RUN}),
    Role.BILLING: frozenset({Capability.VIEW, Capability.PAY}),
    Role.VIEWER: frozenset({Capability.VIEW}),
}


def allows(role: str, capability: Capability) -> bool:
    """Whether `role` may do `capability`."""
    return capability in CAPABILITIES[Role(role)]
