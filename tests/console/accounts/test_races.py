"""Two at once, on PostgreSQL, with real threads."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from django.db import connection

from console.accounts import services
from console.accounts.errors import LastOwner
from console.accounts.models import Membership, Organization
from console.accounts.roles import Role
from tests.factories.accounts import MembershipFactory, UserFactory

pytestmark = pytest.mark.django_db(transaction=True)


def together(*calls):
    barrier = Barrier(len(calls))

    def run(call):
        barrier.wait()
        try:
            return call()
        except LastOwner as error:
            return error
        finally:
            connection.close()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def test_two_owners_who_demote_each_other():
    for _ in range(5):
        first = MembershipFactory()
        second = MembershipFactory(organization=first.organization)
        outcomes = together(
            lambda first=first: services.change_role(membership=first, role=Role.VIEWER, actor=None),
            lambda second=second: services.remove_member(membership=second, actor=None),
        )
        assert sum(isinstance(outcome, LastOwner) for outcome in outcomes) == 1
        assert Membership.objects.filter(organization=first.organization, role=Role.OWNER).count() == 1


def test_two_organizations_of_one_name():
    users = [UserFactory() for _ in range(4)]
    together(*(lambda user=user: services.create_organization(user=user, name="Lab") for user in users))
    assert sorted(Organization.objects.values_list("slug", flat=True)) == ["lab", "lab-2", "lab-3", "lab-4"]


def test_activating_twice_makes_one_row(django_user_model):
    owner = MembershipFactory()
    call = lambda: services.activate_service(membership=owner, accept_terms=True)
    rows = together(call, call, call)
    assert len({row.pk for row in rows}) == 1
