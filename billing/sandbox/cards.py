"""Stripe's test cards and other payment methods, with the numbers and behaviour of Stripe's test mode. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Challenge(Enum):
    """When a card's bank requires authentication."""

    NEVER = "never"
    UNLESS_SAVED = "unless saved"
    ALWAYS = "always"


@dataclass(frozen=True)
class TestCard:
    """The behaviour of a test card. `declines` and `declines_later` are (code, decline code, message)."""

    number: str
    brand: str = "visa"
    declines: tuple[str, str, str] | None = None
    declines_later: tuple[str, str, str] | None = None
    """The decline of a card that can be saved but not charged."""
    challenge: Challenge = Challenge.NEVER
    disputes: bool = False
    refund_fails: bool = False

    @property
    def last4(self) -> str:
        """Return the last four digits, which a customer may see."""
        return self.number[-4:]


# Declines: code, decline code and message of Stripe.
GENERIC_DECLINE = ("card_declined", "generic_decline", "Your card was declined.")
INSUFFICIENT_FUNDS = ("card_declined", "insufficient_funds", "Your card has insufficient funds.")
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
TOKENS = {
    "tok_visa": "4242424242424242",
    "pm_card_visa": "4242424242424242",
    "tok_mastercard": "5555555555554444",
    "tok_chargeDeclined": "4000000000000002",
    "tok_chargeCustomerFail": "4000000000000341",
    "tok_createDispute": "4000000000000259",
}
"""Stripe's names for test cards, which requests use instead of numbers."""
BRANDS = {"visa": "Visa", "mastercard": "Mastercard"}
REDIRECTS = {"alipay": "Alipay", "wechat_pay": "WeChat Pay"}
"""Redirect payment methods: the customer confirms on another page, here the challenge page."""
OFFERED = {"cny": ("alipay", "wechat_pay"), "hkd": ("alipay", "wechat_pay"), "usd": ("alipay",), "eur": ("alipay",)}
"""Redirect methods offered per currency; cards are always offered."""
AUTHENTICATION_REQUIRED = (
    "authentication_required",
    "authentication_required",
    "Your card was declined. This transaction requires authentication.",
)
FAILED_CHALLENGE = (
    "payment_intent_authentication_failure",
    "",
    "We are unable to authenticate your payment method. Please choose a different payment method and try again.",
)


def card_of(text: str) -> TestCard | None:
    """Return the test card with this number (spaces allowed) or Stripe name."""
    digits = "".join(character for character in TOKENS.get(text, text) if character.isdigit())
    return CARDS.get(digits)
