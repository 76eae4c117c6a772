import pytest
from django.urls import reverse

from console.accounts import services
from console.accounts.models import AuditEvent, Membership, User
from console.accounts.roles import Role
from tests.factories.accounts import UserFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def admin(client):
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    return client


@pytest.mark.parametrize("model", ["user", "organization", "membership", "apitoken", "auditevent"])
def test_lists_and_pages_open_and_show_no_secret(admin, owner, model):
    token, _ = services.create_token(membership=owner, name="laptop")
    objects = {"user": owner.user, "organization": owner.organization, "membership": owner, "apitoken": token}
    obj = objects.get(model) or AuditEvent.objects.first()
    assert admin.get(reverse(f"admin:accounts_{model}_changelist"), {"q": "a"}).status_code == 200
    page = admin.get(reverse(f"admin:accounts_{model}_change", args=[obj.pk]))
    assert page.status_code == 200
    assert token.digest not in page.content.decode()


def test_a_person_added_by_an_administrator_gets_an_organization(admin):
    form = {
        "email": "new@example.com",
        "usable_password": "true",
        "password1": "plain horse 9",
        "password2": "plain horse 9",
    }
    answer = admin.post(reverse("admin:accounts_user_add"), form)
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    assert User.objects.get(email="new@example.com").memberships.get().role == Role.OWNER


def run(admin, model, action, *objects):
    data = {"action": action, "_selected_action": [obj.pk for obj in objects]}
    return admin.post(reverse(f"admin:accounts_{model}_changelist"), data, follow=True)


def test_role_actions_keep_the_last_owner(admin, owner, member):
    page = run(admin, "membership", "make_viewer", owner, member)
    assert "needs an owner" in page.content.decode()
    roles = dict(Membership.objects.values_list("pk", "role"))
    assert (roles[owner.pk], roles[member.pk]) == (Role.OWNER, Role.VIEWER)
    run(admin, "membership", "remove", member)
    assert not Membership.objects.filter(pk=member.pk).exists()


def test_suspending_and_revoking(admin, owner):
    services.activate_service(membership=owner, accept_terms=True)
    token, _ = services.create_token(membership=owner, name="laptop")
    run(admin, "organization", "suspend_service", owner.organization)
    run(admin, "apitoken", "revoke", token)
    token.refresh_from_db()
    assert token.revoked_at
    assert not services.is_active(owner.organization)


def test_quota_is_edited_in_the_organization(admin, owner):
    page = admin.get(reverse("admin:accounts_organization_change", args=[owner.organization.pk]))
    assert "max_running_nodes" in page.content.decode()
