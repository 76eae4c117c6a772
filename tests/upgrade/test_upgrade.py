"""An installation of version 0.1 is migrated with its data, and its running job goes on.

`version-0.1.dump` is a backup of version 0.1 (pg_dump's custom format): one customer with a finished, a failed, a
running and two waiting jobs, an invoice, promotional credit and an API token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connection
from django.test import Client
from pytest_django import DjangoDbBlocker

from billing.models import Account, Receipt
from billing.reconciliation import check_ledger
from console.accounts.models import User
from console.backup import database
from jobs.dispatch import dispatch_queue
from jobs.models import Attempt, Job
from jobs.reconciliation import reconcile_job
from jobs.run_specs import launch_spec
from jobs.states import JobState
from runtime.specs import Outcome
from tests.fakes import FakeBackend

DUMP = Path(__file__).with_name("version-0.1.dump")
FINISHED, FAILED, RUNNING, WAITING = 1, 2, 3, 4
"""Primary keys of jobs in the dump. WAITING is one of the two waiting jobs."""


@pytest.fixture
def upgraded(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """A database of its own with the dump of version 0.1, migrated to this version."""
    settings = connection.settings_dict
    original_name, upgrade_name = settings["NAME"], f"{settings['NAME']}_upgrade"
    with django_db_blocker.unblock():
        with connection.cursor() as cursor:
            cursor.execute(f'CREATE DATABASE "{upgrade_name}"')
        connection.close()
        settings["NAME"] = upgrade_name
        try:
            database.replace(DUMP)
            call_command("migrate", interactive=False, verbosity=0)
            yield
        finally:
            connection.close()
            settings["NAME"] = original_name
            with connection.cursor() as cursor:
                cursor.execute(f'DROP DATABASE "{upgrade_name}" WITH (FORCE)')


@pytest.mark.slow
@pytest.mark.usefixtures("upgraded")
def test_an_installation_of_version_0_1_is_upgraded_with_its_running_job(backend: FakeBackend) -> None:
    assert set(check_ledger().values()) == {0}, "no check finds a wrong row"
    states = dict(Job.objects.values_list("pk", "state"))
    assert (states[FINISHED], states[FAILED]) == (JobState.SUCCEEDED, JobState.FAILED)
    assert (states[RUNNING], states[WAITING]) == (JobState.RUNNING, JobState.QUEUED)
    held = Account.objects.get(organization__isnull=False, kind=Account.Kinds.WALLET).held_minor

    _put_on_cluster(backend, Attempt.objects.get(job=RUNNING))
    backend.end(f"job-{RUNNING}-1", Outcome.COMPLETED)
    reconcile_job(job_pk=RUNNING)
    assert Job.objects.get(pk=RUNNING).state == JobState.SUCCEEDED
    assert Receipt.objects.get(hold__order__job=RUNNING).total_minor > 0
    dispatch_queue()
    assert Job.objects.get(pk=WAITING).state == JobState.STARTING

    # The hold of the job that has ended is released; one that starts keeps its hold.
    assert Account.objects.get(organization__isnull=False, kind=Account.Kinds.WALLET).held_minor < held
    assert set(check_ledger().values()) == {0}
    _check_pages()


def _put_on_cluster(backend: FakeBackend, attempt: Attempt) -> None:
    """Give the fake cluster the run that version 0.1 submitted, as it was a minute after its start."""
    assert attempt.started_at
    started_at = attempt.started_at.timestamp()
    backend.clock = lambda: started_at + 60  # today the run's deadline is long past
    backend.submit(launch_spec(attempt))
    backend.start(attempt.run_name, at=started_at)


def _check_pages() -> None:
    """Check that the customer's pages, which read the migrated rows, can be opened."""
    client = Client()
    client.force_login(User.objects.get(memberships__role="owner"))
    pages = ["/", "/jobs/", "/wallet/", "/invoices/", "/costs/", "/credit/", "/training/new/", "/organization/"]
    pages += [f"/jobs/{pk}/" for pk in Job.objects.values_list("pk", flat=True)]
    answers = {page: client.get(page).status_code for page in pages}
    assert answers == dict.fromkeys(pages, 200)
