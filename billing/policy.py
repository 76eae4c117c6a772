"""The billing policy that administrators set for the whole installation."""

from __future__ import annotations

from billing.models import BillingPolicy


def policy() -> BillingPolicy:
    """Return the saved policy, or one with default values if none was saved."""
    return BillingPolicy.objects.first() or BillingPolicy()
