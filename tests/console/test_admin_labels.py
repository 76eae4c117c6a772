"""Administrators who read Chinese find no English label in `/admin/`."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import unfold
from django.apps import apps
from django.contrib import admin
from django.contrib.admin.utils import flatten_fieldsets, get_fields_from_path, label_for_field
from django.core.exceptions import FieldDoesNotExist
from django.utils.translation import gettext, override

from console import admin_theme
from console.accounts.models import User

KEPT_IN_ENGLISH = {
    "ID": "Chinese writes it so",
    "SHA-256": "the name of an algorithm",
    "OpenID Connect IdP": "the name of a standard",
}
"""Labels without a Chinese character, and why."""


@pytest.fixture
def administrator_request(rf):
    request = rf.get("/admin/")
    request.user = User(email="root@example.com", is_staff=True, is_superuser=True)
    return request


def list_labels(model_admin, request) -> Iterator[tuple[str, object]]:
    """Yield the labels of a list's columns, filters and actions."""
    for column in model_admin.get_list_display(request):
        yield f"column {column}", label_for_field(column, model_admin.model, model_admin)
    for each in model_admin.get_list_filter(request):
        is_path = isinstance(each, str)
        yield (
            f"filter {each}",
            get_fields_from_path(model_admin.model, each)[-1].verbose_name if is_path else each.title,
        )
    for name, (_function, _name, description) in model_admin.get_actions(request).items():
        yield f"action {name}", description


def form_labels(options, form, request, row) -> Iterator[tuple[str, object]]:
    """Yield the labels of the headings, fields and choices of a page or inline. `row` is None on a page that adds."""
    fieldsets = options.get_fieldsets(request, row)
    for heading, _attributes in fieldsets:
        if heading:
            yield "heading", heading
    for name in flatten_fieldsets(fieldsets):
        if field := form.base_fields.get(name):
            if not field.widget.is_hidden:
                yield f"field {name}", field.label
        else:
            yield f"field {name}", label_for_field(name, options.model, options)
        yield from ((f"choice of {name}", label) for label in choice_labels(options.model, name))


def choice_labels(model, name) -> list[object]:
    """Return the labels of a model field's choices; none if there is no such field."""
    try:
        return [label for value, label in model._meta.get_field(name).flatchoices if value]
    except FieldDoesNotExist:
        return []


def labels(model_admin, request) -> Iterator[tuple[str, object]]:
    """Yield the place and text of every label that the admin shows of a model."""
    options = model_admin.opts
    yield "app", options.app_config.verbose_name
    yield "model", options.verbose_name
    yield "models", options.verbose_name_plural
    yield from list_labels(model_admin, request)
    rows = [model_admin.model()] + [None] * model_admin.has_add_permission(request)
    for row in rows:
        form = model_admin.get_form(request, row, change=row is not None)
        yield from form_labels(model_admin, form, request, row)
        for inline in model_admin.get_inline_instances(request, row):
            place = type(inline).__name__
            yield place, inline.verbose_name_plural
            inline_form = inline.get_formset(request, row).form
            for name, label in form_labels(inline, inline_form, request, row):
                yield f"{place}, {name}", label


@pytest.mark.django_db
def test_every_label_of_the_admin_is_chinese_for_those_who_read_chinese(administrator_request):
    shown = {}
    with override("zh-hans"):
        for model in filter(admin.site.is_registered, apps.get_models()):
            for place, label in labels(admin.site.get_model_admin(model), administrator_request):
                shown[f"{model.__name__}: {place}"] = str(label)
    assert {place: label for place, label in shown.items() if label.isascii() and label not in KEPT_IN_ENGLISH} == {}
    assert set(KEPT_IN_ENGLISH) <= set(shown.values()), "KEPT_IN_ENGLISH lists a label that is not shown"


def test_every_text_of_the_admins_theme_is_chinese_for_those_who_read_chinese():
    folder = Path(unfold.__file__).parent / "templates"
    templates = [path for path in folder.rglob("*.html") if path.name != "empty_results.html"]  # replaced by our own
    texts = {str(text) for text in admin_theme.TEXTS} | {
        text
        for path in templates
        for _quote, text in re.findall(r"{% *trans(?:late)? ([\"'])(.+?)\1[^%]*%}", path.read_text(encoding="utf-8"))
    }
    assert len(texts) > 50
    with override("zh-hans"):
        assert [text for text in sorted(texts) if gettext(text) == text] == []
