import pytest
from django.db import connection
from django.db.models import F

from billing import audit, charges, tasks
from billing.models import Account, Entry
from console.operations import signs
from tests.factories.accounts import OrganizationFactory
from tests.factories.billing import book, quote, wallet

pytestmark = pytest.mark.django_db
RIGHT = {"transactions": 0, "balances": 0, "holds": 0}


@pytest.fixture
def account():
    """A wallet with money in it and something held."""
    book()
    made = wallet(OrganizationFactory(), balance_minor=10_000)
    charges.hold(quote=quote(made), reference="audit")
    made.refresh_from_db()
    assert made.held_minor
    return made


def test_books_that_are_right(account):
    assert audit.check_books() == RIGHT


def test_a_balance_that_does_not_equal_its_entries(account, caplog):
    Account.objects.filter(pk=account.pk).update(posted_minor=F("posted_minor") + 1)
    assert audit.check_books() == RIGHT | {"balances": 1}
    assert "The books are wrong" in caplog.text


def test_what_is_held_does_not_equal_the_open_holds(account):
    Account.objects.filter(pk=account.pk).update(held_minor=F("held_minor") - 1)
    assert audit.check_books() == RIGHT | {"holds": 1}


def test_a_transaction_that_does_not_sum_to_zero(account):
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # what was written so far has been checked
        cursor.execute("SET LOCAL session_replication_role = replica")  # a hand at the database: no trigger fires
        entry = Entry.objects.filter(account=account).latest("id")
        Entry.objects.create(transaction=entry.transaction, account=account, amount_minor=5)
        cursor.execute("SET LOCAL session_replication_role = origin")
    Account.objects.filter(pk=account.pk).update(posted_minor=F("posted_minor") + 5)
    assert audit.check_books() == RIGHT | {"transactions": 1}


def test_the_task_says_what_it_found(account, embedded):
    signs._not_before.clear()
    tasks.check_books()
    assert signs.newest(signs.seen(), signs.BOOKS)[""].facts == {"wrong": RIGHT}
