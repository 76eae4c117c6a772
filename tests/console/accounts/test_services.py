import pytest

from console.accounts import services
from console.accounts.errors import InvalidInput, LastOwner, NotAllowed, ServiceInactive, TermsNotAccepted
from console.accounts.models import AuditEvent, Membership
from console.accounts.roles import Role
from tests.factories.accounts import MembershipFactory, UserFactory

pytestmark = pytest.mark.django_db


def test_organization_gets_owner_quota_and_a_slug_of_its_own():
    user = UserFactory()
    first = services.create_organization(user=user, name="Deep  Sea Lab")
    second = services.create_organization(user=user, name="Deep Sea Lab")
    assert (first.role, first.organization.name, first.organization.slug) == (
        Role.OWNER,
        "Deep Sea Lab",
        "deep-sea-lab",
    )
    assert second.organization.slug == "deep-sea-lab-2"
    assert first.organization.quota.max_running_nodes > 0


def test_name_without_latin_letters_still_gets_a_slug():
    assert services.create_organization(user=UserFactory(), name="深海实验室").organization.slug == "organization"


@pytest.mark.parametrize("name", ["", "   ", "x" * 101])
def test_names_that_are_no_names(name):
    with pytest.raises(InvalidInput) as caught:
        services.create_organization(user=UserFactory(), name=name)
    assert "name" in caught.value.fields


def test_activation_needs_terms_and_an_owner(owner, member):
    with pytest.raises(TermsNotAccepted):
        services.activate_service(membership=owner, accept_terms=False)
    with pytest.raises(NotAllowed):
        services.activate_service(membership=member, accept_terms=True)
    with pytest.raises(ServiceInactive):
        services.require_active(organization=owner.organization)


def test_activation_can_be_repeated_ended_and_taken_up_again(owner):
    first = services.activate_service(membership=owner, accept_terms=True)
    assert services.activate_service(membership=owner, accept_terms=True).activated_at == first.activated_at
    services.require_active(organization=owner.organization)
    services.deactivate_service(membership=owner)
    assert not services.is_active(owner.organization)
    assert services.deactivate_service(membership=owner).pk == first.pk
    again = services.activate_service(membership=owner, accept_terms=True)
    assert again.pk == first.pk
    assert services.is_active(owner.organization)
    actions = AuditEvent.objects.filter(action__startswith="service.").values_list("action", flat=True)
    assert list(actions) == ["service.activated", "service.deactivated", "service.activated"]


def test_deactivating_what_never_was_active(owner):
    assert services.deactivate_service(membership=owner) is None


def test_last_owner_stays(owner, member):
    with pytest.raises(LastOwner):
        services.change_role(membership=owner, role=Role.VIEWER, actor=owner.user)
    with pytest.raises(LastOwner):
        services.remove_member(membership=owner, actor=owner.user)
    services.change_role(membership=member, role=Role.OWNER, actor=owner.user)
    services.remove_member(membership=owner, actor=owner.user)
    services.remove_member(membership=owner, actor=owner.user)
    assert list(Membership.objects.filter(organization=member.organization)) == [member]


def test_add_member(owner):
    person = UserFactory()
    added = services.add_member(
        organization=owner.organization, email=f" {person.email.upper()} ", role="viewer", actor=owner.user
    )
    assert (added.user, added.role) == (person, "viewer")
    for email in (person.email, "nobody@example.com"):
        with pytest.raises(InvalidInput) as caught:
            services.add_member(organization=owner.organization, email=email, role="viewer", actor=owner.user)
        assert "email" in caught.value.fields
    with pytest.raises(InvalidInput) as caught:
        services.change_role(membership=added, role="emperor", actor=owner.user)
    assert "role" in caught.value.fields


def test_token_secret_is_stored_hashed(owner):
    token, secret = services.create_token(membership=owner, name="laptop")
    assert secret.startswith("ty_")
    assert len(secret) == 43
    assert secret.startswith(token.prefix)
    assert secret not in str(token.__dict__)
    services.revoke_token(token=token, actor=owner.user)
    services.revoke_token(token=token, actor=owner.user)
    token.refresh_from_db()
    assert token.revoked_at is not None
    assert AuditEvent.objects.filter(action="token.revoked").count() == 1


def test_tokens_end_with_the_membership(owner, member):
    services.create_token(membership=member, name="laptop")
    services.remove_member(membership=member, actor=owner.user)
    assert not MembershipFactory._meta.model.objects.filter(pk=member.pk).exists()
