"""Organizations, memberships, the activation of the service, and closed accounts; races run on real threads."""

import pytest
from django.utils import timezone

from console.accounts import services
from console.accounts.models import ApiToken, AuditEvent, Closure, Membership, Organization, User
from console.accounts.roles import Role
from console.core.errors import InvalidInput, LastOwner, NotAllowed, ServiceInactive, SoleOwner, TermsNotAccepted
from tests.factories.accounts import MembershipFactory, UserFactory
from tests.racing import together

pytestmark = pytest.mark.django_db


def test_invalid_input_names_its_field(owner):
    with pytest.raises(InvalidInput) as caught:
        services.change_role(membership=owner, role="emperor", actor=None)
    assert "role" in caught.value.fields
    for name in ("   ", "x" * 101):
        with pytest.raises(InvalidInput) as caught:
            services.create_organization(user=owner.user, name=name)
        assert "name" in caught.value.fields


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


def test_activation_needs_accepted_terms_and_an_owner(owner, member):
    with pytest.raises(TermsNotAccepted):
        services.activate_service(membership=owner, accept_terms=False)
    with pytest.raises(NotAllowed):
        services.activate_service(membership=member, accept_terms=True)
    with pytest.raises(ServiceInactive):
        services.require_active(organization=owner.organization)


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
    User.objects.filter(pk=member.user_id).update(is_active=False)  # an owner who cannot log in is no other owner
    with pytest.raises(LastOwner):
        services.remove_member(membership=owner, actor=owner.user)
    User.objects.filter(pk=member.user_id).update(is_active=True)
    for _twice in range(2):
        services.remove_member(membership=owner, actor=owner.user)
    assert list(Membership.objects.filter(organization=member.organization)) == [member]


def test_a_token_is_revoked_once_and_ends_with_its_membership(owner, member):
    token, _ = services.create_token(membership=member, name="laptop")
    for _ in range(2):
        services.revoke_token(token=token, actor=owner.user)
    assert AuditEvent.objects.filter(action="token.revoked").count() == 1
    services.remove_member(membership=member, actor=owner.user)
    assert not ApiToken.objects.exists()


def test_the_api_changes_a_role_and_renames_the_organization_but_not_its_slug(api, owner, member):
    client, slug = api(owner), owner.organization.slug
    path = f"/api/v1/organization/members/{member.pk}/"
    assert client.patch(path, {"role": "billing"}).data["role"] == "billing"
    assert client.patch(path, {}).data["fields"]["role"]
    renamed = client.patch("/api/v1/organization/", {"name": "New name", "slug": "stolen"}).data
    assert (renamed["name"], renamed["slug"]) == ("New name", slug)


@pytest.mark.django_db(transaction=True)
def test_two_owners_who_demote_each_other_leave_one_owner():
    for _ in range(5):  # one race may miss the moment
        first = MembershipFactory()
        second = MembershipFactory(organization=first.organization)
        outcomes = together(
            lambda first=first: services.change_role(membership=first, role=Role.VIEWER, actor=None),
            lambda second=second: services.remove_member(membership=second, actor=None),
        )
        assert sum(isinstance(outcome, LastOwner) for outcome in outcomes) == 1
        assert Membership.objects.filter(organization=first.organization, role=Role.OWNER).count() == 1


@pytest.mark.django_db(transaction=True)
def test_organizations_created_at_once_get_different_slugs():
    users = [UserFactory() for _ in range(4)]
    together(*(lambda user=user: services.create_organization(user=user, name="Lab") for user in users))
    assert sorted(Organization.objects.values_list("slug", flat=True)) == ["lab", "lab-2", "lab-3", "lab-4"]


@pytest.mark.django_db(transaction=True)
def test_activations_at_once_create_one_row():
    owner = MembershipFactory()
    call = lambda: services.activate_service(membership=owner, accept_terms=True)
    assert len({row.pk for row in together(call, call, call)}) == 1


def test_closing_an_account_needs_another_owner_or_a_closed_organization_and_keeps_the_audit_log():
    owner = MembershipFactory()
    member = MembershipFactory(organization=owner.organization, role=Role.MEMBER)
    services.create_token(membership=owner, name="ci")
    with pytest.raises(SoleOwner, match=owner.organization.name):
        services.close_account(user=owner.user)
    administrator = UserFactory(is_staff=True)
    with pytest.raises(SoleOwner):  # no administrator can close their own
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


@pytest.mark.django_db(transaction=True)
def test_of_two_owners_who_close_their_accounts_at_once_one_stays():
    first = MembershipFactory()
    second = MembershipFactory(organization=first.organization)
    together(*(lambda member=member: services.close_account(user=member.user) for member in (first, second)))
    assert Membership.objects.get().role == Role.OWNER
