"""The pages of jobs, orders, sweeps and products in `/admin/`."""

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils.html import escape

from console.accounts.models import AuditEvent
from console.web import activity
from jobs import selectors
from jobs.models import Job, Order, Product
from jobs.sweeps import progress
from runtime.specs import Outcome
from tests.factories.accounts import UserFactory


def test_jobs_and_orders_are_read_only(admin, customer):
    job = customer.end(customer.started(), Outcome.CODE_FAILED, message="Rank 1 exited.")
    for model, row in (("job", job), ("order", job.order)):
        assert admin.get(reverse(f"admin:jobs_{model}_changelist"), {"q": "1"}).status_code == 200
        page = reverse(f"admin:jobs_{model}_change", args=[row.pk])
        answer = admin.get(page)
        assert answer.status_code == 200
        assert 'name="_save"' not in answer.content.decode()
        assert admin.get(reverse(f"admin:jobs_{model}_add")).status_code == 403
        assert admin.post(reverse(f"admin:jobs_{model}_delete", args=[row.pk]), {"post": "yes"}).status_code == 403
        assert admin.post(page, {"state": "succeeded"}).status_code == 403
    assert "Rank 1 exited." in admin.get(reverse("admin:jobs_job_change", args=[job.pk])).content.decode()
    assert Job.objects.get().state == "failed"
    assert Order.objects.count() == 1


def test_an_operator_stops_a_job_with_a_reason_that_the_customer_sees(admin, customer):
    job = customer.job()
    reason = selectors.waiting_for(selectors.job_for(job.organization, job.pk))
    assert reason
    assert escape(reason) in admin.get(reverse("admin:jobs_job_change", args=[job.pk])).content.decode()
    page = reverse("admin:jobs_job_stop", args=[job.pk])
    assert "ends as if the customer had cancelled it" in admin.get(page).content.decode()
    assert "The reason must have" in admin.post(page, {"why": " "}).content.decode()
    assert not Job.objects.get().cancel_requested_at
    assert admin.post(page, {"why": "It mines coins."}).status_code == 302
    assert Job.objects.get().state == "cancelled"
    assert "An administrator stopped this job: It mines coins." in [row.sentence for row in selectors.events(job)]
    event = AuditEvent.objects.get(action="job.stopped_by_operator")
    assert (event.actor.is_staff, event.organization) == (True, job.organization)
    assert event.data == {"why": "It mines coins."}
    chinese = {"headers": {"accept-language": "zh-hans"}}
    for name, arguments, sentence in (
        ("jobs_job_change", [job.pk], "管理员已停止此任务：It mines coins."),
        ("accounts_auditevent_changelist", [], f"管理员停止了任务 #{job.pk}"),
        ("accounts_auditevent_change", [event.pk], f"管理员停止了任务 #{job.pk}"),
    ):
        assert sentence in admin.get(reverse(f"admin:{name}", args=arguments), **chinese).content.decode()
    assert "already ended" in admin.post(page, {"why": "It still does."}).content.decode()
    attempt = customer.started()
    for read in (job, attempt.job):  # one that waited, and one that runs: while it stops, and afterwards
        if read == attempt.job:
            admin.post(reverse("admin:jobs_job_stop", args=[read.pk]), {"why": "It mines coins."})
            read.refresh_from_db()
            assert selectors.summary(read)["detail"] == "An administrator stopped this job: It mines coins."
            customer.end(attempt, Outcome.STOPPED)
        read.refresh_from_db()
        detail = selectors.summary(read)["detail"]
        assert (read.state, detail) == ("cancelled", "An administrator stopped this job: It mines coins.")


def test_an_operator_reads_the_log_and_the_audit_log_says_so(admin, customer):
    attempt = customer.started()
    customer.backend.runs[attempt.run_name].output = {1: b"<b>rank one</b>\n"}
    shown = admin.get(reverse("admin:jobs_job_log", args=[attempt.job_id]), {"rank": 1}).content.decode()
    assert "&lt;b&gt;rank one&lt;/b&gt;" in shown
    assert f'<a href="{reverse("admin:index")}"' in shown  # the way back, under the console's name
    event = AuditEvent.objects.get(action="job.log_read_by_operator")
    assert (event.target, event.data["rank"]) == (f"job:{attempt.job_id}", 1)
    invalid = {"rank": "9", "offset": "x"}  # shows the last rank, from the start
    assert admin.get(reverse("admin:jobs_job_log", args=[attempt.job_id]), invalid).status_code == 200
    page = admin.get(reverse("admin:jobs_job_change", args=[attempt.job_id])).content.decode()
    assert all(reverse(f"admin:jobs_job_{name}", args=[attempt.job_id]) in page for name in ("log", "stop"))


def test_stopping_and_reading_need_their_permissions(client, sweeper):
    sweep = sweeper.buy()
    staff = UserFactory(is_staff=True)
    client.force_login(staff)
    job = sweep.trials.first().job
    log, stop = (reverse(f"admin:jobs_job_{name}", args=[job.pk]) for name in ("log", "stop"))
    stop_sweep = reverse("admin:jobs_sweep_stop", args=[sweep.pk])
    # Permissions add up. The expected statuses are those of: the log, stopping the job, stopping the sweep. 302 means
    # that it was stopped; the second time, the page says that the job has already ended.
    for codename, expected in (
        (None, (403, 403, 403)), ("view_job", (200, 403, 403)), ("view_sweep", (200, 403, 403)),
        ("change_job", (200, 302, 403)), ("change_sweep", (200, 200, 302)),
    ):  # fmt: skip
        staff.user_permissions.add(*Permission.objects.filter(codename=codename))
        answers = (client.get(log), client.post(stop, {"why": "x"}), client.post(stop_sweep, {"why": "x"}))
        assert tuple(answer.status_code for answer in answers) == expected, codename


def test_an_operator_reads_and_stops_a_sweep(admin, sweeper, django_assert_max_num_queries):
    sweep = sweeper.buy(concurrency=4)
    assert admin.get(reverse("admin:jobs_sweep_changelist"), {"q": "1"}).status_code == 200
    page, stop = (reverse(f"admin:jobs_sweep_{name}", args=[sweep.pk]) for name in ("change", "stop"))
    smallest = sweeper.buy(concurrency=1)
    with CaptureQueriesContext(connection) as of_one_trial:
        admin.get(reverse("admin:jobs_sweep_change", args=[smallest.pk]))
    with django_assert_max_num_queries(len(of_one_trial)):
        shown = admin.get(page).content.decode()
    assert sweep.trials.count() == 4
    assert all(reverse("admin:jobs_job_change", args=[trial.job_id]) in shown for trial in sweep.trials.all())
    assert 'name="_save"' not in shown
    assert admin.post(page, {"state": "ended"}).status_code == 403
    assert "no more trials" in admin.get(stop).content.decode()
    assert "The reason must have" in admin.post(stop, {"why": " "}).content.decode()
    assert admin.post(stop, {"why": "It mines coins."}).status_code == 302
    for _ in range(2):  # the first cancels the jobs of the trials, the second records their ends and ends the sweep
        progress.advance(sweep_pk=sweep.pk)
    sweep.refresh_from_db()
    assert (sweep.state, sweep.reason) == ("ended", "stopped")
    event = AuditEvent.objects.get(action="sweep.stopped_by_operator")
    assert (event.actor.is_staff, event.organization) == (True, sweep.organization)
    assert activity.describe(event) == f"An administrator stopped sweep #{sweep.pk}: It mines coins."
    assert "already ended" in admin.post(stop, {"why": "It still does."}).content.decode()


@pytest.mark.usefixtures("customer")  # which creates the catalogue
def test_an_administrator_changes_products_but_not_their_names(admin):
    product = Product.objects.get(name="metered")
    page = reverse("admin:jobs_product_change", args=[product.pk])
    form = {
        "name": "renamed", "title": "Training by the second", "description": "", "mode": "fixed", "position": 1,
        "reference_seconds_per_epoch": "5", "headroom": "3", "max_epochs": 10, "max_nodes": 2, "max_seconds": 600,
        "is_active": "on",
    }  # fmt: skip
    assert admin.post(page, form).status_code == 302
    product.refresh_from_db()
    assert (product.title, product.max_nodes) == ("Training by the second", 2)
    assert (product.name, product.mode) == ("metered", "metered")
    # Below 1 the ceiling would be lower than the estimate, so the form is shown again.
    assert admin.post(page, form | {"headroom": "0.5"}).status_code == 200
    assert admin.post(reverse("admin:jobs_product_delete", args=[product.pk]), {"post": "yes"}).status_code == 403
    assert admin.get(reverse("admin:jobs_product_changelist")).status_code == 200


def test_lists_of_large_tables_count_no_rows_and_need_no_query_for_each_row(admin, customer):
    customer.end(customer.started(), Outcome.COMPLETED)
    for _ in range(8):
        customer.job(nodes=1)
    lists = ("jobs_job", "jobs_order", "billing_quote", "billing_hold", "billing_receipt", "billing_transaction")
    for name in (*lists, "accounts_auditevent"):
        with CaptureQueriesContext(connection) as captured:
            assert admin.get(reverse(f"admin:{name}_changelist")).status_code == 200
        assert not [query["sql"] for query in captured if f'COUNT(*) AS "__count" FROM "{name}"' in query["sql"]], name
        assert len(captured) < 9, name  # a query for each of the 9 jobs, orders, quotes and holds would be more
