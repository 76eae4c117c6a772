"""How values look, in two languages."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.utils.translation import override

from console.web.templatetags import trainyard


@pytest.mark.parametrize(
    ("minor", "currency", "language", "text"),
    [
        (1234, "USD", "en", "$12.34"),
        (1234, "JPY", "en", "¥1,234"),
        (1234, "KWD", "en", "KWD1.234"),
        (1234, "CNY", "zh-hans", "¥12.34"),
        (None, "USD", "en", "–"),
        ("", "USD", "en", "–"),
    ],
)
def test_money(minor: int | str | None, currency: str, language: str, text: str) -> None:
    with override(language):
        assert trainyard.money(minor, currency) == text


def test_a_rate_keeps_its_decimals() -> None:
    assert trainyard.rate(Decimal("81.25"), "USD") == "$0.8125"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (7260, "2 h 01 min"), (180_000, "2 d 2 h"), (None, "–")],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert trainyard.duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (300 * 1024**3, "300 GiB")])
def test_bytes(size: int, text: str) -> None:
    assert trainyard.bytes_(size) == text


def test_signs() -> None:
    assert trainyard.signed_money(500, "USD") == "+$5.00"
    assert trainyard.signed_money(-500, "USD") == "−$5.00"
