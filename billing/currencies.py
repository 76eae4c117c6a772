"""The minor unit of each currency, as the payment provider counts it. PURE.

Hides that ISO 4217, CLDR (Babel) and Stripe disagree: CLDR gives ISK, RSD or UGX no decimals where Stripe counts
hundredths, so that an amount passed on as it is would be off by a hundred. The one rule: every amount of this house is
in Stripe's unit, whoever keeps, shows or sends it; what is not in the tables can't be sold in.

After https://docs.stripe.com/currencies: "Presentment currencies", "Zero-decimal currencies", "Special cases".
"""

from __future__ import annotations

ZERO_DECIMALS = frozenset(
    ("BIF", "CLP", "DJF", "GNF", "JPY", "KMF", "KRW", "MGA", "PYG", "RWF", "VND", "VUV", "XAF", "XOF", "XPF")
)
WHOLE_ONLY = frozenset(("ISK", "UGX"))
"""Counted in hundredths for compatibility, and paid in whole units: amounts end in 00."""
THREE_DECIMALS = frozenset(("BHD", "JOD", "KWD", "OMR", "TND"))
"""Counted in thousandths, and paid in tens of them."""
_TWO_DECIMALS = """
    AED AFN ALL AMD ANG AOA ARS AUD AWG AZN BAM BBD BDT BGN BMD BND BOB BRL BSD BWP BYN BZD CAD CDF CHF CNY COP CRC
    CVE CZK DKK DOP DZD EGP ETB EUR FJD FKP GBP GEL GIP GMD GTQ GYD HKD HNL HTG HUF IDR ILS INR JMD KES KGS KHR KYD
    KZT LAK LBP LKR LRD LSL MAD MDL MKD MMK MNT MOP MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK NPR NZD PAB PEN PGK PHP
    PKR PLN QAR RON RSD RUB SAR SBD SCR SEK SGD SHP SLE SOS SRD STD SZL THB TJS TOP TRY TTD TWD TZS UAH USD UYU UZS
    WST XCD XCG YER ZAR ZMW
"""
TWO_DECIMALS = frozenset(_TWO_DECIMALS.split())
SUPPORTED = ZERO_DECIMALS | WHOLE_ONLY | TWO_DECIMALS | THREE_DECIMALS
LARGEST_PAYMENT = 99_999_999
"""Stripe takes eight digits, whatever the currency."""


def decimals(currency: str) -> int:
    """How many decimals of the major unit the minor unit is."""
    if currency in ZERO_DECIMALS:
        return 0
    return 3 if currency in THREE_DECIMALS else 2


def step(currency: str) -> int:
    """What every payment and refund is a multiple of, in minor units. What runs cost is rounded to 1, not to this."""
    if currency in WHOLE_ONLY:
        return 100
    return 10 if currency in THREE_DECIMALS else 1


def payable(amount_minor: int, currency: str) -> int:
    """The smallest amount that can be paid and is no less."""
    return -(-amount_minor // step(currency)) * step(currency)
