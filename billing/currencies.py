"""The minor unit of each currency, as Stripe counts it. Pure functions.

ISO 4217, CLDR (Babel) and Stripe disagree. For example, CLDR gives ISK, RSD and UGX no decimals, but Stripe counts
hundredths: an amount in CLDR's unit would be wrong by a factor of 100. All amounts in Trainyard therefore use Stripe's
unit. A currency that is missing from these tables is not supported.

Source: https://docs.stripe.com/currencies, "Presentment currencies", "Zero-decimal currencies", "Special cases".
"""

from __future__ import annotations

ZERO_DECIMALS = frozenset(
    ("BIF", "CLP", "DJF", "GNF", "JPY", "KMF", "KRW", "MGA", "PYG", "RWF", "VND", "VUV", "XAF", "XOF", "XPF")
)
WHOLE_ONLY = frozenset(("ISK", "UGX"))
"""Stripe counts these in hundredths but accepts whole units only: amounts must end in 00."""
THREE_DECIMALS = frozenset(("BHD", "JOD", "KWD", "OMR", "TND"))
"""Stripe counts these in thousandths but accepts multiples of ten only."""
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
"""Stripe's largest amount in minor units: eight digits in every currency."""


def decimals(currency: str) -> int:
    """Return the number of decimals of the currency's minor unit: 2 if it is a hundredth of the major unit."""
    if currency in ZERO_DECIMALS:
        return 0
    return 3 if currency in THREE_DECIMALS else 2


def step(currency: str) -> int:
    """Return the number of minor units that each payment and refund must be a multiple of.

    Charges for runs, which move money only within the ledger, need not be such a multiple.
    """
    if currency in WHOLE_ONLY:
        return 100
    return 10 if currency in THREE_DECIMALS else 1


def round_up_for_payment(amount_minor: int, currency: str) -> int:
    """Round an amount in minor units up to the next multiple of the currency's step."""
    return -(-amount_minor // step(currency)) * step(currency)
