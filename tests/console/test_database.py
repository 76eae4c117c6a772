"""A connection is looked at before it is used. On threads' own connections, to the real server."""

import pytest
from django.db import DataError, connection

from console.database import base


@pytest.fixture
def own(transactional_db):
    made = connection.copy()
    made.ensure_connection()
    assert made.is_usable()  # asked: it is new
    yield made
    made.close()


@pytest.fixture
def asked(monkeypatch):
    """How often the server was asked whether a connection stands."""
    seen, ask = [], base.base.DatabaseWrapper.is_usable
    monkeypatch.setattr(base.base.DatabaseWrapper, "is_usable", lambda self: seen.append(1) or ask(self))
    return seen


def test_one_that_was_used_a_moment_ago_is_not_asked(own, asked):
    assert own.is_usable()
    assert asked == []


def test_one_that_was_quiet_or_has_failed_is_asked(own, asked, monkeypatch):
    own.errors_occurred = True
    assert own.is_usable()
    assert asked == [1]
    own.errors_occurred = False
    monkeypatch.setattr(base, "ASK_SECONDS", 0.0)
    assert own.is_usable()
    assert asked == [1, 1]


def test_one_whose_transaction_has_failed_is_asked(own):
    own.set_autocommit(False)
    with pytest.raises(DataError), own.cursor() as cursor:
        cursor.execute("SELECT 1 / 0")
    assert not own.is_usable()


def test_one_that_the_server_has_ended_is_told_at_once(own):
    with own.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        process = cursor.fetchone()[0]
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [process])
        assert cursor.fetchone() == (True,)
    assert not own.is_usable()
    own.close()
    assert own.is_usable() is False
    own.ensure_connection()
    assert own.is_usable()
