"""What an administrator has set for the whole installation. The one rule: there is always a policy, if an empty one."""

from __future__ import annotations

from billing.models import BillingPolicy


def policy() -> BillingPolicy:
    """The policy; one of defaults before an administrator has saved one."""
    return BillingPolicy.objects.first() or BillingPolicy()
