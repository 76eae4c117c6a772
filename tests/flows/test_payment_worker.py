"""A real Celery worker that is killed while a thousand payment events wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from django.conf import settings
from django.db import connection

from billing import events, tasks
from billing.models import StripeEvent, TopUp
from tests.books import BROKEN_BOOKS, broken
from tests.console.processes import wait_for
from tests.factories.billing import TopUpFactory, session_event, wallet
from tests.flows.console import ROOT

pytestmark = [pytest.mark.flow, pytest.mark.django_db(transaction=True)]
EVENTS = 1000
WORKER = ("-m", "celery", "-A", "console.celery", "worker", "--concurrency", "2", "--without-mingle", "-l", "INFO")


@contextmanager
def worker(queue, log):
    """A worker of this test's own: its database, a queue of its own name, and a group that dies as one."""
    address = connection.settings_dict
    url = f"postgres://postgres@/{address['HOST'].replace('/', '%2F')}/{address['NAME']}"
    environment = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "console.settings"}
    process = subprocess.Popen(
        [sys.executable, *WORKER, "-Q", queue],
        cwd=ROOT,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def left():
    return StripeEvent.objects.exclude(state=StripeEvent.States.APPLIED).count()


def test_a_thousand_events_lose_none_while_the_worker_is_killed_twice(tmp_path):
    account = wallet()
    top_ups = TopUp.objects.bulk_create(TopUpFactory.build_batch(EVENTS, account=account))
    for top_up in top_ups:
        event = session_event(top_up)
        events.store(event, json.dumps(event))
    queue = f"test-{os.getpid()}"
    with (tmp_path / "worker.log").open("wb") as log:
        for until in (900, 500, 0):  # at the first two it is killed, in the middle of its work
            with worker(queue, log) as process:
                tasks.apply_events.apply_async(queue=queue)
                wait_for(lambda until=until: left() <= until or process.poll() is not None, 120)
                assert process.poll() is None, (tmp_path / "worker.log").read_text()
                assert not until or left() > 0
    assert left() == 0
    account.refresh_from_db()
    assert account.posted_minor == EVENTS * 5000
    assert TopUp.objects.filter(state=TopUp.States.PAID).count() == EVENTS
    assert broken(BROKEN_BOOKS) == {}
    assert settings.CELERY_TASK_ACKS_LATE
