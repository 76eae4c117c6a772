"""Stripe's test cards, and what else can be paid with. PURE: what each does, not when.

The one rule: numbers and behaviour are those of Stripe's own test mode, so that what was tried here can be tried there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Challenge(Enum):
    """When a card's bank asks its holder to confirm."""

    NEVER = "never"
    UNLESS_SAVED = "unless saved"
    ALWAYS = "always"


@dataclass(frozen=True)
class TestCard:
    """What a test card does. `declines` and `declines_later` are (code, decline code, sentence)."""

    number: str
    brand: str = "visa"
    declines: tuple[str, str, str] | None = None
    declines_later: tuple[str, str, str] | None = None
    """It can be saved, and is then declined."""
    challenge: Challenge = Challenge.NEVER
    disputes: bool = False
    refund_fails: bool = False

    @property
    def last4(self) -> str:
        """What a customer may be shown of it."""
        return self.number[-4:]


GENERIC = ("card_declined", "generic_decline", "Your card was declined.")
POOR = ("card_declined", "insufficient_funds", "Your card has insufficient funds.")
CARDS = {
    card.number: card
    for card in (
        TestCard("4242424242424242"),
        TestCard("5555555555554444", brand="mastercard"),
        TestCard("4000000000000002", declines=GENERIC),
        TestCard("4000000000009995", declines=POOR),
        TestCard("4000000000000341", declines_later=GENERIC),
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
"""Names that Stripe gives to cards in requests, for those who must not send numbers."""
BRANDS = {"visa": "Visa", "mastercard": "Mastercard"}
REDIRECTS = {"alipay": "Alipay", "wechat_pay": "WeChat Pay"}
"""Other means: the customer confirms on the means' own page, here the challenge page."""
OFFERED = {"cny": ("alipay", "wechat_pay"), "hkd": ("alipay", "wechat_pay"), "usd": ("alipay",), "eur": ("alipay",)}
"""Which of them a payment page offers, by currency; cards are always offered."""
AUTHENTICATE = (
    "authentication_required",
    "authentication_required",
    "Your card was declined. This transaction requires authentication.",
)
ABANDONED = (
    "payment_intent_authentication_failure",
    "",
    "We are unable to authenticate your payment method. Please choose a different payment method and try again.",
)


def card_of(text: str) -> TestCard | None:
    """The test card with a number, spaces or not, or with a name of Stripe's."""
    digits = "".join(character for character in TOKENS.get(text, text) if character.isdigit())
    return CARDS.get(digits)
