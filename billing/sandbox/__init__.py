"""A Stripe of our own on loopback, for use without keys: payment pages, cards, refunds, disputes, signed webhooks.

Speaks the part of Stripe's HTTP API that `billing.gateway` uses, and some more, to the same `stripe` client. It proves
our code, not Stripe. The one rule: it moves play money only, so it refuses to start beside keys of Stripe's and listens
on loopback alone.
"""

from billing.sandbox.delivery import Delivery
from billing.sandbox.provider import Provider
from billing.sandbox.server import serve
from billing.sandbox.store import Store

__all__ = ["Delivery", "Provider", "Store", "serve"]
