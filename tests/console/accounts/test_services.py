"""Organizations, memberships, the activation of the service, and closed accounts; races run on real threads."""

import pytest
from django.utils import timezone

from console.accounts import services
from console.accounts.models import ApiToken, AuditEvent, Closure, Membership, Organization, User
from console.accounts.roles import Role
from console.core.errors import LastOwner, SoleOwner
from tests.factories.accounts import MembershipFactory, UserFactory
from tests.racing import together

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("name", "slugs"),
    [("Deep  Sea Lab", ["deep-sea-lab", "deep-sea-lab-2"]), ("深海实验室", ["organization", "organization-2"])],
)
def test_an_organization_gets_an_owner_a_quota_and_a_unique_slug(name, slugs):
    created = [services.create_organization(user=UserFactory(), name=name) for _ in slugs]
    assert [each.organization.slug for each in created] == slugs
    assert created[0].organization.name == " ".join(name.split())
    assert created[0].role == Role.OWNER
    assert created[0].organization.quota.max_running_nodes > 0


def test_activation_and_deactivation_may_be_repeated(owner):
    assert services.deactivate_service(membership=owner) is None
    first = services.activate_service(membership=owner, accept_terms=True)
    assert services.activate_service(membership=owner, accept_terms=True).activated_at == first.activated_at
    services.require_active(organization=owner.organization)
    for _ in range(2):
        services.deactivate_service(membership=owner)
        assert not services.is_active(owner.organization)
    assert services.activate_service(membership=owner, accept_terms=True).pk == first.pk
    assert services.is_active(owner.organization)
    actions = AuditEvent.objects.filter(action__startswith="service.").values_list("action", flat=True)
    assert list(actions) == ["service.activated", "service.deactivated", "service.activated"]


def test_the_last_owner_cannot_be_removed(owner, member):
    with pytest.raises(LastOwner):
        services.change_role(membership=owner, role=Role.VIEWER, actor=owner.user)
    with pytest.raises(LastOwner):
        services.remove_member(membership=owner, actor=owner.user)
    services.change_role(membership=member, role=Role.OWNER, actor=owner.user)
    User.objects.filter(pk=member.user_id).update(is_active=False)  # an owner who cannot log in does not count
    with pytest.raises(LastOwner):
        services.remove_member(membership=owner, actor=owner.user)
    User.objects.filter(pk=member.user_id).update(is_active=True)
    for _twice in range(2):
        services.remove_member(membership=owner, actor=owner.user)
    assert list(Membership.objects.filter(organization=member.organization)) == [member]


def test_the_api_changes_a_role_and_renames_the_organization_but_not_its_slug(api, owner, member):
    client, slug = api(owner), owner.organization.slug
    path = f"/api/v1/organization/members/{member.pk}/"
    assert client.patch(path, {"role": "billing"}).data["role"] == "billing"
    for wrong in ({}, {"role": "emperor"}):
        assert client.patch(path, wrong).data["fields"]["role"]
    for name in ("   ", "x" * 101):
        assert client.patch("/api/v1/organization/", {"name": name}).data["fields"]["name"]
    renamed = client.patch("/api/v1/organization/", {"name": "New name", "slug": "stolen"}).data
    assert (renamed["name"], renamed["slug"]) == ("New name", slug)


@pytest.mark.django_db(transaction=True)
def test_two_owners_who_remove_each_other_or_themselves_at_once_leave_one_owner():
    for _ in range(5):  # in a single try, the two calls may not overlap
        first = MembershipFactory()
        second = MembershipFactory(organization=first.organization)
        outcomes = together(
            lambda first=first: services.change_role(membership=first, role=Role.VIEWER, actor=None),
            lambda second=second: services.remove_member(membership=second, actor=None),
        )
        assert sum(isinstance(outcome, LastOwner) for outcome in outcomes) == 1
        assert Membership.objects.filter(organization=first.organization, role=Role.OWNER).count() == 1
    first = MembershipFactory()
    second = MembershipFactory(organization=first.organization)
    together(*(lambda member=member: services.close_account(user=member.user) for member in (first, second)))
    assert Membership.objects.get(organization=first.organization).role == Role.OWNER


@pytest.mark.django_db(transaction=True)
def test_organizations_created_at_once_get_different_slugs_and_activations_at_once_one_row():
    users = [UserFactory() for _ in range(4)]
    owners = together(*(lambda user=user: services.create_organization(user=user, name="Lab") for user in users))
    assert sorted(Organization.objects.values_list("slug", flat=True)) == ["lab", "lab-2", "lab-3", "lab-4"]
    call = lambda: services.activate_service(membership=owners[0], accept_terms=True)
    assert len({row.pk for row in together(call, call, call)}) == 1


def test_closing_an_account_needs_another_owner_or_a_closed_organization_and_keeps_the_audit_log():
    owner = MembershipFactory()
    member = MembershipFactory(organization=owner.organization, role=Role.MEMBER)
    services.create_token(membership=owner, name="ci")
    with pytest.raises(SoleOwner, match=owner.organization.name):
        services.close_account(user=owner.user)
    administrator = UserFactory(is_staff=True)
    with pytest.raises(SoleOwner):  # administrators can never close their own account
        services.close_account(user=administrator)
    administrator.delete()
    services.close_account(user=member.user)
    Closure.objects.create(organization=owner.organization, ends_at=timezone.now())
    services.close_account(user=owner.user)
    assert not User.objects.exists()
    assert not ApiToken.objects.exists()
    gone = AuditEvent.objects.filter(action="account.closed").order_by("id")
    assert [(event.actor, event.actor_name) for event in gone] == [(None, member.user.email), (None, owner.user.email)]
    assert AuditEvent.objects.get(action="token.created").actor_name == owner.user.email
