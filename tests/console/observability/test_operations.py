"""The figures on the first page of `/admin/`."""

from datetime import timedelta

import pytest
from django.core.cache import cache
from django.urls import reverse
from django.utils import timezone

from billing.amounts import money
from billing.models import Receipt, StripeEvent
from jobs.models import Attempt
from runtime.specs import Outcome
from tests.factories.accounts import UserFactory
from tests.factories.jobs import start


@pytest.fixture(autouse=True)
def no_cached_sums():
    """Delete the sums that an earlier test left in the cache, which would be shown instead of this test's."""
    cache.delete_many(["operations:revenue", "operations:ends"])


def test_the_first_page_shows_revenue_open_work_ends_of_runs_and_problems(client, customer):
    customer.end(customer.started(nodes=1), Outcome.COMPLETED)
    customer.end(customer.started(nodes=1), Outcome.CODE_FAILED)
    customer.started(nodes=2)
    stuck = customer.job(nodes=1)
    start(stuck)  # claimed and submitted; unlike after `customer.started`, no node runs, so the job stays STARTING
    # Longer ago than STUCK_AFTER.
    Attempt.objects.filter(job=stuck).update(claimed_at=timezone.now() - timedelta(hours=1))
    customer.job(nodes=1)  # waits in the queue
    StripeEvent.objects.create(event_id="evt_1", type="charge.refunded", payload={}, state="quarantined")

    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    context = client.get(reverse("admin:index")).context
    shown = {figure.title: (figure.value, figure.is_bad) for figure in context["figures"]}
    charged = sum(Receipt.objects.values_list("total_minor", flat=True))
    assert shown["Charged in 30 days"] == (money(charged, customer.wallet.currency), False)
    # The running job has two nodes, and the stuck one has one.
    assert [shown[title][0] for title in ("Runs on the clusters", "Nodes in use", "Waiting jobs")] == ["2", "3", "1"]
    assert (shown["Stuck jobs"], shown["Quarantined payment events"]) == (("1", True), ("1", True))
    _utilization, ends = context["tables"]
    assert [row[1:] for row in ends.rows] == [("1", "50.0%"), ("1", "50.0%")]  # one row for each reason
