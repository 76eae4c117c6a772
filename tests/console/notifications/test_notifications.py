"""Notices to members: their list, and which of them are mailed to whom."""

import time

import pytest
from django.core import mail
from django.urls import reverse

from billing import emails
from console.accounts.roles import Role
from console.notifications import services
from console.notifications.models import Notification
from jobs import free_estimates, reconciliation, run_mails
from jobs.messages import sweep_end_sentence
from jobs.models import Sweep
from jobs.sweeps import progress
from runtime.specs import Outcome
from tests.factories.accounts import MembershipFactory

pytestmark = pytest.mark.django_db


def test_ends_of_jobs_are_listed_and_a_failure_is_mailed_to_the_buyer(client, customer):
    other = MembershipFactory(organization=customer.organization, role=Role.OWNER)
    customer.end(customer.started(nodes=1), Outcome.COMPLETED)
    failed = customer.end(customer.started(nodes=1), Outcome.CODE_FAILED, message="Rank 0 exited.")
    kinds = Notification.objects.order_by("pk").values_list("kind", flat=True)
    assert list(kinds)[-2:] == ["job.succeeded", "job.failed"]

    assert run_mails.send_due() == 2  # both are marked as handled, though only the failure is mailed
    assert run_mails.send_due() == 0
    [sent] = mail.outbox
    assert sent.to == [customer.membership.user.email]
    assert f"#{failed.pk} " in sent.subject
    assert f"/jobs/{failed.pk}/" in sent.body

    for member in (customer.membership, other):
        client.force_login(member.user)
        assert f"#{failed.pk} " in client.get(reverse("notification_list")).content.decode()
    client.force_login(MembershipFactory().user)
    assert f"#{failed.pk} " not in client.get(reverse("notification_list")).content.decode()


def test_a_free_run_that_failed_is_not_said_to_cost_anything(client, customer, backend):
    job = free_estimates.order_free_estimate(membership=customer.membership, data=customer.form()).job
    customer.end(customer.run(job), Outcome.OUT_OF_MEMORY)
    run_mails.send_due()
    [sent] = mail.outbox
    client.force_login(customer.membership.user)
    for text in (sent.body, client.get(reverse("notification_list")).text):
        assert ("This run was free." in text, "You pay" in text) == (True, False)


def test_a_hang_that_is_charged_is_said_to_be_paid_everywhere(client, customer):
    attempt = customer.started(at=time.time() - 600)
    customer.backend.hang(attempt.run_name, progress_at=time.time(), data={"seconds": 120, "charged_whole": True})
    reconciliation.reconcile_job(job_pk=attempt.job_id)
    run_mails.send_due()
    [sent] = mail.outbox
    client.force_login(customer.membership.user)
    for text in (sent.body, client.get(reverse("notification_list")).text):
        assert ("is free" in text, "until the run was ended" in text) == (False, True)


def test_the_end_of_a_sweep_is_mailed_in_place_of_its_trials(client, sweeper, customer):
    sweep = sweeper.buy(trials=2, concurrency=2, space={"LR": {"type": "categorical", "choices": [0.1]}})
    good, bad = sweep.trials.order_by("number")
    sweeper.run(good, 0.75)
    sweeper.run(bad, outcome=Outcome.CODE_FAILED)
    progress.advance(sweep_pk=sweep.pk)
    progress.advance(sweep_pk=sweep.pk)  # repeated, as by another process: it publishes no second notification
    kinds = Notification.objects.order_by("pk").values_list("kind", flat=True)
    assert list(kinds)[-2:] == ["job.failed", "sweep.ended"]
    assert "job.succeeded" not in kinds  # of trials, only failures are published

    run_mails.send_due()
    [sent] = mail.outbox
    assert (sent.to, sweep.name in sent.subject) == ([customer.membership.user.email], True)
    for text in ("1 of 2 trials completed.", f"Best accuracy: 0.75 (job #{good.job_id})", "of at most", "LR=0.1"):
        assert text in sent.body
    client.force_login(customer.membership.user)
    assert "1 of 2 trials completed." in client.get(reverse("notification_list")).content.decode()


def test_every_end_of_a_sweep_has_a_sentence():
    data = {"trials": 0, "trials_completed": 0, "metric": "loss", "best": None, "charged_minor": 0, "ceiling_minor": 5}
    assert all(sweep_end_sentence(data | {"reason": reason, "currency": "USD"}) for reason in Sweep.Reasons.values)


def test_a_member_chooses_what_is_mailed(client, customer):
    client.force_login(customer.membership.user)
    # The contrary of the default, by which failures are mailed and successes are not.
    client.post(reverse("notification_choices"), {"mailed": ["job.succeeded", "nonsense"]})
    succeeded = customer.end(customer.started(nodes=1), Outcome.COMPLETED)
    customer.end(customer.started(nodes=1), Outcome.CODE_FAILED)
    run_mails.send_due()
    [sent] = mail.outbox
    assert f"#{succeeded.pk} " in sent.subject
    assert emails.mail_recipients(customer.organization, "invoice.issued") == set()
    # Emails about failed top-ups, disputes and unpaid storage go to all payers, and cannot be declined.
    assert emails.payers(customer.organization) == {customer.membership.user}


def test_notifications_about_money_and_expiring_files_are_hidden_from_viewers(client, owner):
    for kind in ("wallet.topped_up", "wallet.low"):
        data = {"amount_minor": 500, "available_minor": 500, "currency": "USD"}
        services.publish(organization=owner.organization, kind=kind, data=data)
    data = {"percent": 80, "of": ""}  # "": of the whole organization's budget
    services.publish(organization=owner.organization, kind="budget.reached", data=data)
    data = {"invoice": 1, "number": "R-1", "total_minor": 100, "currency": "USD"}
    services.publish(organization=owner.organization, kind="invoice.issued", data=data)
    services.publish(organization=owner.organization, kind="files.expiring", data={"jobs": [1, 2]})
    client.force_login(owner.user)
    shown = client.get(reverse("notification_list")).content.decode()
    assert all(text in shown for text in ("$5.00", "80 %", "R-1: $1.00", "#1, #2"))
    client.force_login(MembershipFactory(organization=owner.organization, role=Role.VIEWER).user)
    shown = client.get(reverse("notification_list")).content.decode()
    assert "Nothing happened yet" in shown
