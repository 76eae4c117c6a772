"""The brand's files, the operator's legal texts, and the context by which every page shows them. All are public."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from console.installation import selectors
from console.installation.models import Brand, LegalText

KEEP = "public, max-age=31536000, immutable"
"""The addresses of the files change with the brand."""


def context(_request: HttpRequest) -> dict[str, Any]:
    """Return `installation`, a callable: only templates that show it read it."""
    return {"installation": selectors.installation}


@require_safe
@login_not_required
def brand_style(_request: HttpRequest) -> HttpResponse:
    """Return the style sheet with the brand's colour."""
    brand = Brand.objects.first()
    if brand is None or not brand.color:
        raise Http404
    light, dark = brand.color, on_dark(brand.color)
    text = "\n".join(
        f"{theme} {{ --tblr-primary: {color}; --tblr-primary-rgb: {', '.join(map(str, channels(color)))}; "
        f"--tblr-primary-darken: {mixed(color, other, 0.15)}; }}"
        for theme, color, other in ((":root", light, "#000000"), ('[data-bs-theme="dark"]', dark, "#ffffff"))
    )
    return HttpResponse(text, content_type="text/css", headers={"Cache-Control": KEEP})


@require_safe
@login_not_required
def brand_logo(_request: HttpRequest) -> HttpResponse:
    """Return the brand's logo."""
    brand = Brand.objects.first()
    if brand is None or not brand.logo:
        raise Http404
    return HttpResponse(bytes(brand.logo), content_type="image/png", headers={"Cache-Control": KEEP})


@require_safe
@login_not_required
def legal_text(request: HttpRequest, kind: str) -> HttpResponse:
    """Show the current terms or privacy policy; without terms of the operator's, the built-in ones."""
    text = selectors.current(kind)
    if text is None and kind != LegalText.Kinds.TERMS:
        raise Http404("There is no such text.")
    title = LegalText.Kinds(kind).label
    return render(
        request, "legal_text.html", {"title": title, "text": text, "terms_version": selectors.terms_version()}
    )


def channels(color: str) -> tuple[int, int, int]:
    """Return red, green and blue of #rrggbb, 0 to 255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def mixed(color: str, other: str, share: float) -> str:
    """Return a colour with a share of another one."""
    pairs = zip(channels(color), channels(other), strict=True)
    return "#" + "".join(f"{round(own * (1 - share) + mix * share):02x}" for own, mix in pairs)


def on_dark(color: str) -> str:
    """Return a lighter shade that can be read on a dark page: the darkest with half of the light of white."""
    shades = (mixed(color, "#ffffff", step / 20) for step in range(21))
    return next(shade for shade in shades if sum(channels(shade)) >= 3 * 160)
