"""The admin's pages of users, organizations, memberships and tokens, and their actions."""

import pytest
from allauth.account.models import EmailAddress
from django.urls import reverse

from console.accounts import service_accounts, services
from console.accounts.models import Membership, User
from console.accounts.roles import Role

pytestmark = pytest.mark.django_db


def run_action(admin_client, model, action, *objects):
    data = {"action": action, "_selected_action": [obj.pk for obj in objects]}
    return admin_client.post(reverse(f"admin:accounts_{model}_changelist"), data, follow=True)


def test_pages_open_and_show_no_secret(admin_client, owner):
    token, _ = services.create_token(membership=owner, name="laptop")
    address = EmailAddress.objects.create(user=owner.user, email=owner.user.email)
    for obj in (owner.user, owner.organization, owner, token, address):
        label = f"admin:{obj._meta.app_label}_{obj._meta.model_name}"
        assert admin_client.get(reverse(f"{label}_changelist"), {"q": "a"}).status_code == 200
        page = admin_client.get(reverse(f"{label}_change", args=[obj.pk])).content.decode()
        assert token.digest not in page
        assert ("max_running_nodes" in page) == (obj == owner.organization)  # a field of its quota


def test_a_user_added_by_an_administrator_gets_an_organization(admin_client):
    passwords = {"usable_password": "true", "password1": "plain horse 9", "password2": "plain horse 9"}
    admin_client.post(reverse("admin:accounts_user_add"), {"email": "New@example.com"} | passwords)
    assert User.objects.get(email="new@example.com").memberships.get().role == Role.OWNER


def test_role_actions_keep_the_last_owner(admin_client, owner, member):
    page = run_action(admin_client, "membership", "make_viewer", owner, member)
    assert "needs at least one owner" in page.content.decode()
    roles = dict(Membership.objects.values_list("pk", "role"))
    assert (roles[owner.pk], roles[member.pk]) == (Role.OWNER, Role.VIEWER)
    run_action(admin_client, "membership", "remove", member)
    assert not Membership.objects.filter(pk=member.pk).exists()


def test_role_actions_leave_service_accounts_alone(admin_client, owner):
    robot = service_accounts.create(actor=owner, name="ci", role=Role.MEMBER).membership
    for action in ("make_owner", "remove"):
        page = run_action(admin_client, "membership", action, robot)
        assert "is changed and deleted by its organization" in page.content.decode()
    assert Membership.objects.get(pk=robot.pk).role == Role.MEMBER


def test_the_service_is_suspended_and_a_token_revoked(admin_client, owner):
    services.activate_service(membership=owner, accept_terms=True)
    token, _ = services.create_token(membership=owner, name="laptop")
    run_action(admin_client, "organization", "suspend_service", owner.organization)
    run_action(admin_client, "apitoken", "revoke", token)
    token.refresh_from_db()
    assert token.revoked_at
    assert not services.is_active(owner.organization)
