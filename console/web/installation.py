"""Public views that serve the brand's style sheet and logo and the operator's legal texts.

`context` provides the variable `installation` of all templates.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from console.installation import selectors
from console.installation.models import MIN_CONTRAST, Brand, LegalText, contrast

CACHE_CONTROL = "public, max-age=31536000, immutable"
"""Browsers keep the brand's files for a year: the files get new URLs when the brand changes."""

DARK_CARD = "#262626"
"""The background of cards in the dark theme (Tabler's gray-800). It is the lightest background on which this theme
shows text in the brand's colour, so a colour that is readable on cards is readable everywhere."""
TINT_SHARE = 0.12
"""The largest share of the brand's colour in a tinted background below text in that colour (in `trainyard.css`)."""
HOVER_SHARE = 0.15
"""The share of black (light theme) or white (dark theme) in the colour of a button under the pointer.
The button without a brand (`--tblr-primary-darken` in `trainyard.css`) changes by about as much."""


def context(_request: HttpRequest) -> dict[str, Any]:
    """Return the variable `installation`. It is callable, so that only templates that use it cause a query."""
    return {"installation": cache(selectors.installation)}  # for this request: a page uses it a dozen times


@require_safe
def brand_style(_request: HttpRequest) -> HttpResponse:
    """Return the style sheet with the brand's colour."""
    brand = Brand.objects.first()
    if brand is None or not brand.color:
        raise Http404
    light_theme = _theme_rule(":root", brand.color, hover=mix(brand.color, "#000000", HOVER_SHARE))
    dark_color = lighten(brand.color)
    dark_theme = _theme_rule('[data-bs-theme="dark"]', dark_color, hover=mix(dark_color, "#ffffff", HOVER_SHARE))
    text = f"{light_theme}\n{dark_theme}"
    return HttpResponse(text, content_type="text/css", headers={"Cache-Control": CACHE_CONTROL})


def _theme_rule(selector: str, color: str, *, hover: str) -> str:
    """Return the CSS rule that sets Tabler's variables of the primary colour and of links.

    `hover` is the colour of a button under the pointer. Tabler calls its variable `darken`, but in the dark theme it is
    lighter than `color`.
    """
    values = {"primary": color, "primary-rgb": _rgb(color), "primary-darken": hover}
    values |= {"link-color": color, "link-color-rgb": _rgb(color)}
    values |= {"link-hover-color": hover, "link-hover-color-rgb": _rgb(hover)}
    return f"{selector} {{ {' '.join(f'--tblr-{name}: {value};' for name, value in values.items())} }}"


def _rgb(color: str) -> str:
    return ", ".join(map(str, channels(color)))


@require_safe
def brand_logo(_request: HttpRequest) -> HttpResponse:
    """Return the brand's logo."""
    brand = Brand.objects.first()
    if brand is None or not brand.logo:
        raise Http404
    return HttpResponse(bytes(brand.logo), content_type="image/png", headers={"Cache-Control": CACHE_CONTROL})


@require_safe
def legal_text(request: HttpRequest, kind: str) -> HttpResponse:
    """Show the current terms or privacy policy. Without the operator's own terms, show the built-in ones."""
    text = selectors.current_text(kind)
    if text is None and kind != LegalText.Kinds.TERMS:
        raise Http404("There is no such text.")
    title = LegalText.Kinds(kind).label
    return render(
        request, "legal_text.html", {"title": title, "text": text, "terms_version": selectors.terms_version()}
    )


def channels(color: str) -> tuple[int, int, int]:
    """Return red, green and blue of #rrggbb, 0 to 255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def mix(color: str, other: str, share: float) -> str:
    """Return a mixture of two colours; `share` is the share of `other`, 0 to 1."""
    pairs = zip(channels(color), channels(other), strict=True)
    return "#" + "".join(f"{round(first * (1 - share) + second * share):02x}" for first, second in pairs)


def lighten(color: str) -> str:
    """Return the colour with just enough white, in steps of 5 %, to be readable on a dark card.

    The card's background may itself be tinted with the returned colour (TINT_SHARE).
    """
    shades = (mix(color, "#ffffff", percent / 100) for percent in range(0, 101, 5))
    return next(shade for shade in shades if contrast(shade, mix(DARK_CARD, shade, TINT_SHARE)) >= MIN_CONTRAST)
