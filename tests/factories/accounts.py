"""Users, organizations and members, as sign-up would make them."""

from __future__ import annotations

import factory
from django.test import Client
from factory.django import DjangoModelFactory

from console.accounts.models import Membership, Organization, Quota, User
from console.accounts.roles import Role

PASSWORD = "correct horse battery"


class UserFactory(DjangoModelFactory):
    class Meta:
        model = User
        skip_postgeneration_save = True

    email = factory.Sequence(lambda n: f"person{n}@example.com")
    password = factory.django.Password(PASSWORD)


class QuotaFactory(DjangoModelFactory):
    class Meta:
        model = Quota


class OrganizationFactory(DjangoModelFactory):
    class Meta:
        model = Organization
        skip_postgeneration_save = True

    name = factory.Sequence(lambda n: f"Organization {n}")
    slug = factory.Sequence(lambda n: f"organization-{n}")
    quota = factory.RelatedFactory(QuotaFactory, factory_related_name="organization")


class MembershipFactory(DjangoModelFactory):
    class Meta:
        model = Membership

    user = factory.SubFactory(UserFactory)
    organization = factory.SubFactory(OrganizationFactory)
    role = Role.OWNER


def logged_in(user: User) -> Client:
    """Return a browser in which the user is logged in."""
    client = Client()
    client.force_login(user)
    return client
