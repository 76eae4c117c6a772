"""Stripe's test cards and other payment methods, with the numbers and behaviour of Stripe's test mode. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Challenge(Enum):
    """When the bank of a card requires the payer to authenticate (3-D Secure)."""

    NEVER = "never"
    UNLESS_SAVED = "unless saved"
    ALWAYS = "always"


class Decline(NamedTuple):
    """Why Stripe or the bank declines a card: Stripe's error code, its decline code (may be empty), and its message."""

    code: str
    decline_code: str
    message: str


@dataclass(frozen=True)
class TestCard:
    """The behaviour of a test card."""

    number: str
    brand: str = "visa"
    declines: Decline | None = None
    """The decline of each use of the card; None if it is accepted."""
    declines_later: Decline | None = None
    """The decline of a charge to the saved card; saving it succeeds."""
    challenge: Challenge = Challenge.NEVER
    disputes: bool = False
    """Whether each charge is disputed at once."""
    refund_fails: bool = False
    """Whether each refund succeeds at first and then fails."""

    @property
    def last4(self) -> str:
        """Return the last four digits, the part of a number that may be shown."""
        return self.number[-4:]


GENERIC_DECLINE = Decline("card_declined", "generic_decline", "Your card was declined.")
INSUFFICIENT_FUNDS = Decline("card_declined", "insufficient_funds", "Your card has insufficient funds.")
CARDS = {
    card.number: card
    for card in (
        TestCard("4242424242424242"),
        TestCard("5555555555554444", brand="mastercard"),
        TestCard("4000000000000002", declines=GENERIC_DECLINE),
        TestCard("4000000000009995", declines=INSUFFICIENT_FUNDS),
        TestCard("4000000000000341", declines_later=GENERIC_DECLINE),
        TestCard("4000002500003155", challenge=Challenge.UNLESS_SAVED),
        TestCard("4000002760003184", challenge=Challenge.ALWAYS),
        TestCard("4000000000000259", disputes=True),
        TestCard("4000000000005126", refund_fails=True),
    )
}
"""The test cards that the sandbox accepts, by number."""
TOKENS = {
    "tok_visa": "4242424242424242",
    "pm_card_visa": "4242424242424242",
    "tok_mastercard": "5555555555554444",
    "tok_chargeDeclined": "4000000000000002",
    "tok_chargeCustomerFail": "4000000000000341",
    "tok_createDispute": "4000000000000259",
}
"""Stripe's names for test cards, which requests use instead of numbers."""
REDIRECT_METHODS = {"alipay": "Alipay", "wechat_pay": "WeChat Pay"}
"""Titles of the payment methods that redirect: the payer confirms on the method's own page, here the challenge page."""
REDIRECT_METHODS_BY_CURRENCY = {
    "cny": ("alipay", "wechat_pay"),
    "hkd": ("alipay", "wechat_pay"),
    "usd": ("alipay",),
    "eur": ("alipay",),
}
"""Redirect methods that a payment page offers beside cards."""
AUTHENTICATION_REQUIRED = Decline(
    "authentication_required",
    "authentication_required",
    "Your card was declined. This transaction requires authentication.",
)
FAILED_CHALLENGE = Decline(
    "payment_intent_authentication_failure",
    "",
    "We are unable to authenticate your payment method. Please choose a different payment method and try again.",
)


def find_card(text: str) -> TestCard | None:
    """Return the test card with this number, which may contain spaces, or with this Stripe name. None if unknown."""
    number = "".join(TOKENS.get(text, text).split())
    return CARDS.get(number)
