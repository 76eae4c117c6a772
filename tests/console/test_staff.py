"""What administrators without all permissions may do in `/admin/`."""

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Permission
from django.urls import reverse

from billing import pricebooks
from billing.models import PriceBook
from tests.factories.accounts import UserFactory
from tests.factories.billing import book

pytestmark = pytest.mark.django_db
EVERY_MODEL = [
    (model, admin.site.get_model_admin(model)) for model in apps.get_models() if admin.site.is_registered(model)
]


@pytest.fixture
def staff(client):
    client.user = UserFactory(is_staff=True)
    client.force_login(client.user)
    return client


def allow(client, *names):
    client.user.user_permissions.add(*Permission.objects.filter(codename__in=names))


def pages(model, *names):
    options = model._meta
    return [reverse(f"admin:{options.app_label}_{options.model_name}_{name}") for name in names]


def test_staff_without_permissions_reach_no_list_and_no_form(staff):
    addresses = [page for model, _ in EVERY_MODEL for page in pages(model, "changelist", "add")]
    answers = {page: staff.get(page).status_code for page in addresses}
    assert answers == dict.fromkeys(answers, 403)


def test_staff_who_may_only_read_get_no_form_and_no_action_that_changes(staff, rf):
    staff.user.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    request = rf.get("/admin/")
    request.user = staff.user
    for model, model_admin in EVERY_MODEL:
        may = [model_admin.has_add_permission(request), model_admin.has_change_permission(request)]
        assert not any([*may, model_admin.has_delete_permission(request)]), model
        actions = [function for function, _name, _label in model_admin.get_actions(request).values()]
        needed = [getattr(function, "allowed_permissions", None) for function in actions]
        assert all(permissions == ("view",) for permissions in needed), (model, actions)


def test_staff_publish_prices_only_with_the_permission_to_change_them(staff):
    draft = pricebooks.copy(book=book())
    form = {"action": "publish", "_selected_action": [draft.pk]}
    (books,) = pages(PriceBook, "changelist")
    for names, is_published in ((["view_pricebook"], False), (["change_pricebook"], True)):
        allow(staff, *names)
        staff.post(books, form)
        draft.refresh_from_db()
        assert bool(draft.published_at) == is_published
