"""Kept queries: they give what their query sets give, and their SQL is put together once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connection, models, transaction
from django.db.models import Count, Exists, OuterRef, Q
from django.db.models.sql.compiler import SQLCompiler
from django.test.utils import CaptureQueriesContext
from psycopg.types.numeric import Int8

from billing.models import NodeSpec, Price, PriceBook
from console.accounts.models import Membership, Organization, Quota, User
from console.operations.kept import Kept, given
from tests.factories.accounts import MembershipFactory, OrganizationFactory
from tests.factories.billing import NodeSpecFactory, PriceBookFactory, PriceFactory

pytestmark = pytest.mark.django_db


def columns(instance: models.Model, depth: int = 3) -> dict[str, Any]:
    """What is loaded of an instance, related ones with it; they may lead back to it."""
    around = instance._state.fields_cache.items() if depth else ()
    related = {name: columns(each, depth - 1) if each else None for name, each in around}
    return {name: value for name, value in vars(instance).items() if name != "_state"} | {"related": related}


CASES = {
    "a key": (lambda of: Organization.objects.filter(pk=of("pk")), {"pk": "organization_id"}),
    "an instance": (lambda of: Membership.objects.filter(user=of("user")), {"user": "user"}),
    "text, a constant beside it": (
        lambda of: Membership.objects.filter(user__email=of("email"), user__is_active=True),
        {"email": "email"},
    ),
    "related rows": (
        lambda of: Membership.objects.filter(pk=of("pk")).select_related("user", "organization__quota"),
        {"pk": "membership"},
    ),
    "a related row that there is not": (
        lambda of: Price.objects.filter(book=of("book")).select_related("node_spec").order_by("-amount"),
        {"book": "book"},
    ),
    "either of two": (
        lambda of: Membership.objects.filter(Q(user=of("user")) | Q(organization=of("organization"))),
        {"user": "user", "organization": "organization"},
    ),
    "a value that is asked for twice": (
        lambda of: User.objects.filter(Q(email=of("email")) | Q(password=of("email"))),
        {"email": "email"},
    ),
    "a query in it": (
        lambda of: Organization.objects.filter(
            Exists(Membership.objects.filter(organization=OuterRef("pk"), user=of("user")))
        ),
        {"user": "user"},
    ),
    "annotations": (
        lambda of: Organization.objects.filter(pk=of("pk")).annotate(people=Count("memberships")),
        {"pk": "organization_id"},
    ),
    "rows of values, converted": (
        lambda of: Price.objects.filter(book=of("book")).order_by("amount").values_list("amount", "kind", "book"),
        {"book": "book"},
    ),
}


@pytest.fixture
def values() -> dict[str, Any]:
    """What the cases' queries are about, among others of the kind."""
    MembershipFactory()
    member, book = MembershipFactory(), PriceBookFactory()
    PriceFactory(book=book, amount=100)
    PriceFactory(book=book, kind="minimum", node_spec=None, amount=5)
    return {
        "organization": member.organization,
        "organization_id": member.organization_id,
        "user": member.user,
        "email": member.user.email,
        "membership": member.pk,
        "book": book,
    }


@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_its_query_set_gives(values, name):
    query, names = CASES[name]
    chosen = {key: values[value] for key, value in names.items()}
    plain = query(chosen.get)
    kept = Kept(lambda: query(given))
    assert plain, "the case is about something"
    for found, expected in (
        (kept.all(**chosen), list(plain)),
        ([kept.first(**chosen)], [plain.first()]),
        ([kept.get(**chosen)], [plain[0]]),
    ):
        if isinstance(expected[0], models.Model):
            assert [columns(each) for each in found] == [columns(each) for each in expected]
            assert [type(each) for each in found] == [type(each) for each in expected]
        else:
            assert found == expected
    assert kept.exists(**chosen) is True


def test_where_there_is_nothing():
    kept = Kept(lambda: User.objects.filter(email=given("email")))
    assert kept.all(email="nobody@example.com") == []
    assert kept.first(email="nobody@example.com") is None
    assert kept.exists(email="nobody@example.com") is False
    with pytest.raises(User.DoesNotExist):
        kept.get(email="nobody@example.com")


def test_the_sql_is_put_together_once(monkeypatch):
    made: list[str] = []
    compile_it = SQLCompiler.as_sql

    def counted(self, *args, **kwargs):
        made.append("")
        return compile_it(self, *args, **kwargs)

    monkeypatch.setattr(SQLCompiler, "as_sql", counted)
    organizations = [OrganizationFactory(), OrganizationFactory()]
    kept = Kept(lambda: Quota.objects.filter(organization=given("organization")))
    made.clear()
    with CaptureQueriesContext(connection) as asked:
        found = [kept.get(organization=organization) for organization in organizations * 3]
    assert [quota.organization_id for quota in found] == [each.pk for each in organizations * 3]
    assert len(made) == 1
    assert len(asked) == len(found)


def test_first_asks_for_one_row_in_the_query_s_order_or_the_key_s():
    for name in ("b", "a", "c"):
        NodeSpecFactory(name=name, position=0)
    ordered = Kept(lambda: NodeSpec.objects.filter(is_active=given("active")).order_by("-name"))
    by_key = Kept(lambda: NodeSpec.objects.filter(is_active=given("active")).order_by())
    with CaptureQueriesContext(connection) as asked:
        assert ordered.first(active=True).name == "c"
        assert by_key.first(active=True).name == "b"
    assert all(query["sql"].endswith("LIMIT 1") for query in asked)


def test_none_equals_nothing():
    PriceFactory(node_spec=None, kind="minimum")
    assert not Kept(lambda: Price.objects.filter(node_spec=given("spec"))).exists(spec=None)


def test_a_number_that_no_key_can_be_is_no_match():
    kept = Kept(lambda: PriceBook.objects.filter(pk=given("pk")))
    assert [kept.first(pk=pk) for pk in (2**63, -(2**63) - 1, 10**30)] == [None] * 3


def test_a_value_that_is_missing_is_refused():
    kept = Kept(lambda: User.objects.filter(email=given("email")))
    with pytest.raises(KeyError, match="email"):
        kept.first(name="x")


def test_a_lock_is_taken():
    quota = OrganizationFactory().quota
    kept = Kept(lambda: Quota.objects.select_for_update().filter(organization=given("organization")))
    with transaction.atomic(), CaptureQueriesContext(connection) as asked:
        assert kept.get(organization=quota.organization) == quota
    assert asked[0]["sql"].endswith("FOR UPDATE")


def test_whole_numbers_of_every_size_are_one_statement():
    """PostgreSQL plans a statement anew where its values are of other types."""
    kept = Kept(lambda: PriceBook.objects.filter(pk=given("pk")))
    types: list[type] = []

    def see(execute, sql, parameters, many, context):
        types.extend(type(parameter) for parameter in parameters)
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(see):
        for pk in (1, 40_000, 2**40):
            kept.first(pk=pk)
    assert set(types) == {Int8}


@pytest.mark.parametrize("text", ["plain", "50 % off", "%s", "%%s", "it's \\ 'quoted'", "two\nlines", "训练"])
def test_what_never_changes_is_written_into_the_statement(text):
    """PostgreSQL can then keep one plan, and see that a partial index holds what is asked for."""
    spec = NodeSpecFactory(title=text)
    kept = Kept(lambda: NodeSpec.objects.filter(title__in=[text, "another"], is_active=True, pk=given("pk")))
    sent: list[Any] = []

    def see(execute, sql, parameters, many, context):
        sent.extend(parameters)
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(see):
        assert kept.all(pk=spec) == [spec]
        assert kept.exists(pk=spec)
        assert kept.first(pk=spec.pk + 1) is None
    assert sent == [spec.pk, spec.pk, spec.pk + 1]


@pytest.mark.django_db(transaction=True)
def test_threads_with_connections_of_their_own_share_it():
    member = MembershipFactory()
    kept = Kept(lambda: Membership.objects.filter(pk=given("pk")).select_related("user"))
    found: list[str] = []

    def ask() -> None:
        try:
            found.append(kept.get(pk=member.pk).user.email)
        finally:
            connection.close()

    threads = [threading.Thread(target=ask) for _thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [member.user.email] * 4
