"""The overview: what runs and waits, and each thing that needs attention with its link."""

import re
import time
from datetime import timedelta

from django.urls import reverse
from django.utils import timezone

from billing import budgets
from billing.models import AutoTopUp, StorageBalance
from console.accounts.roles import Role
from runtime.specs import Outcome
from storage.models import Allocation
from tests.factories.accounts import MembershipFactory


def page(client):
    return re.sub(r"\s+", " ", client.get(reverse("overview")).content.decode())


def notices(html):
    """Return the links of the notices by their kinds."""
    items = re.findall(r'data-notice="(\w+)">.*?href="([^"]+)"', html)
    return {kind: url.replace("&amp;", "&") for kind, url in items}


def test_the_overview_says_what_runs_what_waits_and_why(customer, owner_page):
    assert notices(page(owner_page)) == {}
    customer.started(nodes=1)
    customer.job()
    html = page(owner_page)
    assert '<span class="stat-value">1</span> <span class="small text-secondary">on 1 node</span>' in html
    assert "Free until they run" in html
    assert "It starts shortly." in html


def test_everything_that_needs_attention_is_linked(customer, browser, owner_page):
    organization, account = customer.organization, customer.wallet
    attempt = customer.started(at=time.time() - 600)  # ten minutes ago, so that it costs more than the budget below
    failed = customer.end(attempt, Outcome.CODE_FAILED)
    Allocation.objects.create(
        organization=organization, kind=Allocation.Kinds.RUN, key="job:1", label="run", size_bytes=1,
        kept_until=timezone.now() + timedelta(days=2),
    )  # fmt: skip
    customer.quota(max_storage_bytes=1)
    budgets.set_budget(membership=customer.membership, user=None, amount_minor=1)
    AutoTopUp.objects.create(
        account=account, is_on=False, threshold_minor=1, amount_minor=1, method_id="pm", method_label="Visa", failures=3
    )
    StorageBalance.objects.create(account=account, due_minor=250)
    html = page(owner_page)
    found = notices(html)
    assert set(found) == {"budget", "card", "unpaid_storage", "failed_jobs", "deletion", "storage"}
    assert "Visa failed and were switched off" in html
    assert "$2.50 for storage is unpaid" in html
    listed = owner_page.get(found["failed_jobs"]).content.decode()
    assert f"#{failed.pk} " in listed
    for url in found.values():
        assert owner_page.get(url).status_code == 200, url
    viewer = browser(MembershipFactory(organization=organization, role=Role.VIEWER))
    for url in notices(page(viewer)).values():
        assert viewer.get(url).status_code == 200, url
