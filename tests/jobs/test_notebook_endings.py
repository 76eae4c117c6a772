"""The notice that a notebook is about to reach its time limit: once per limit, to those who can act on it."""

from datetime import timedelta

import pytest
from django.core import mail
from django.urls import reverse
from django.utils import timezone

from billing.models import Quote
from console.accounts.roles import Role
from console.notifications import services
from console.notifications.models import Notification
from jobs import notebook_endings, notebooks
from jobs.models import Attempt
from runtime.specs import Outcome
from tests.crashes import crash_at
from tests.factories.accounts import MembershipFactory
from tests.factories.notebooks import sell_notebook
from tests.racing import together

pytestmark = pytest.mark.django_db
HOUR = 3600


def before_end(notebook, **left):
    """Return the time at which this much of the notebook's first two hours is left."""
    return Attempt.objects.get(pk=notebook.pk).started_at + timedelta(hours=2) - timedelta(**left)


def let_pass(notebook, **time_passed):
    """Move the notebook's stored start to this long ago. The fake cluster keeps the real start of its run."""
    started_at = timezone.now() - timedelta(**time_passed)
    Attempt.objects.filter(pk=notebook.pk).update(started_at=started_at)


def extend(customer, notebook, seconds=HOUR) -> Quote:
    job = notebooks.notebook_for(customer.organization, notebook.job_id)
    quote = notebooks.quote_extension(membership=customer.membership, job=job, data={"added_seconds": seconds})
    notebooks.place_notebook(membership=customer.membership, quote=quote)
    return quote


def test_a_time_limit_is_announced_once_ten_minutes_before(customer, notebook):
    customer.end(sell_notebook(customer), Outcome.STOPPED)
    customer.started(nodes=1)  # neither an ended notebook nor a training is announced
    for left, announced in (({"minutes": 11}, 0), ({"minutes": 10}, 1), ({"minutes": 9}, 0), ({"seconds": 1}, 0)):
        assert notebook_endings.announce(before_end(notebook, **left)) == announced
    assert notebook_endings.announce(before_end(notebook, seconds=0)) == 0
    data = Notification.objects.get(kind="notebook.ending").data
    assert (data["job"], data["deadline_seconds"], data["is_extensible"]) == (notebook.job_id, 2 * HOUR, True)
    assert data["ends_at"] == before_end(notebook, seconds=0).isoformat()
    short = Attempt.objects.get(pk=sell_notebook(customer, max_seconds=1200).pk)
    for seconds, announced in ((899, 0), (900, 1)):  # a notebook of 20 minutes is announced in its last quarter
        assert notebook_endings.announce(short.started_at + timedelta(seconds=seconds)) == announced


@pytest.mark.django_db(transaction=True)
def test_several_processes_announce_it_once_and_one_that_is_killed_does_not_prevent_it(notebook):
    at = before_end(notebook, minutes=5)
    for step in range(1, 100):
        if not crash_at(step, lambda: notebook_endings.announce(at)):
            break
    assert step > 1
    assert sum(together(*[lambda: notebook_endings.announce(at)] * 3)) == 0
    assert Notification.objects.filter(kind="notebook.ending").count() == 1
    Notification.objects.filter(kind="notebook.ending").delete()  # as if no process had announced it
    assert sum(together(*[lambda: notebook_endings.announce(at)] * 3)) == 1


def test_an_extended_notebook_is_announced_again_before_its_new_limit(customer, notebook):
    assert notebook_endings.announce(before_end(notebook, minutes=5)) == 1
    extend(customer, notebook)
    assert notebook_endings.announce(before_end(notebook, minutes=5)) == 0
    # Five minutes before the new limit, which is an hour after the old one.
    assert notebook_endings.announce(before_end(notebook, hours=-1, minutes=5)) == 1
    limits = Notification.objects.filter(kind="notebook.ending").order_by("pk").values_list("data__deadline_seconds")
    assert list(limits) == [(2 * HOUR,), (3 * HOUR,)]


@pytest.mark.parametrize("extends_runs", [True, False])
def test_the_mail_goes_to_the_member_who_ordered_the_notebook_and_says_how_to_continue(
    client, customer, notebook, monkeypatch, extends_runs
):
    monkeypatch.setattr(type(customer.backend), "extends_runs", extends_runs)
    let_pass(notebook, hours=1, minutes=55)
    notebook_endings.announce_and_mail()
    notebook_endings.announce_and_mail()
    [sent] = mail.outbox
    assert sent.to == [customer.membership.user.email]
    assert f"#{notebook.job_id} " in sent.subject
    address = reverse("notebook_extend" if extends_runs else "job_detail", args=[notebook.job_id])
    assert f"{address}\n" in sent.body
    assert ("Resume it once it has ended" in sent.body) != extends_runs
    viewer = MembershipFactory(organization=customer.organization, role=Role.VIEWER)
    for member in (customer.membership, viewer):  # the notice on the pages is for those who may extend it
        client.force_login(member.user)
        shown = reverse("notebook_extend", args=[notebook.job_id]) in client.get(reverse("notification_list")).text
        assert shown == (extends_runs and member is not viewer)


@pytest.mark.parametrize("reason", ["extended", "ended", "not wanted"])
def test_no_mail_is_sent_that_would_be_wrong_or_unwanted(customer, notebook, reason):
    let_pass(notebook, hours=1, minutes=55)
    assert notebook_endings.announce() == 1
    if reason == "extended":
        extend(customer, notebook)
    elif reason == "ended":
        customer.end(notebook, Outcome.STOPPED)
    else:
        services.choose_mails(membership=customer.membership, mailed=())
    notebook_endings.send_due()
    assert [sent for sent in mail.outbox if "ends soon" in sent.subject] == []


def test_the_page_of_a_notebook_counts_down_and_warns(client, customer, notebook):
    client.force_login(customer.membership.user)

    def warning():
        page = client.get(reverse("job_detail", args=[notebook.job_id])).content.decode()
        assert ('data-seconds-left="' in page) == ('id="notebook-ending"' in page)
        tag = page.partition('id="notebook-ending"')[2].partition(">")[0]
        return tag.split()

    assert warning() == ['data-within-seconds="600"', "hidden"]
    let_pass(notebook, hours=1, minutes=55)
    assert warning() == ['data-within-seconds="600"']
    customer.end(notebook, Outcome.COMPLETED)
    assert warning() == []
