"""A local imitation of Stripe for use without keys: payment pages, cards, refunds, disputes, signed webhooks.

It serves the part of Stripe's HTTP API that `billing.gateway` uses, to the same `stripe` client. It moves play money
only: it refuses to start if Stripe keys are set, and listens on loopback.
"""

from billing.sandbox.delivery import Delivery
from billing.sandbox.provider import Provider
from billing.sandbox.server import serve
from billing.sandbox.store import Store

__all__ = ["Delivery", "Provider", "Store", "serve"]
