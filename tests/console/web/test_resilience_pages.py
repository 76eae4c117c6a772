"""Pages about failing and measuring: the advanced fold, attempts, stacks, telemetry, checks of an image."""

import re
import time

import pytest
from django.test import Client
from django.urls import reverse

from jobs import dispatch
from jobs.models import Job
from runtime.specs import Capacity, Outcome
from tests.factories.jobs import Customer

TOUCHED = "code_path,datasets,epochs,lr,batch_size,nodes,retries,on_hang,min_nodes,controller"


def text(answer) -> str:
    return re.sub(r"\s+", " ", answer.content.decode())


def page(client: Client, job: Job) -> str:
    return text(client.get(reverse("job_detail", args=[job.pk])))


def test_the_fold_is_closed_for_a_simple_run_and_open_for_one_bought_with_it(customer: Customer, owner_page: Client):
    assert '<details class="fold mt-4" id="advanced">' in text(owner_page.get(reverse("training_new")))
    job = customer.job(retries=2, retry_backoff_seconds=7, on_hang="retry", min_nodes=1)
    answer = text(owner_page.get(reverse("training_new"), {"rerun": job.pk}))
    assert '<details class="fold mt-4" id="advanced" open>' in answer
    assert 'name="min_nodes" inputmode="numeric" placeholder="all of them" value="1"' in answer
    assert '<option value="2" selected>2</option>' in answer
    assert '<option value="retry" selected>' in answer


def test_a_job_of_before_the_fold_fills_the_form(customer: Customer, owner_page: Client):
    job = customer.job()
    quote = job.order.quote
    type(quote).objects.filter(pk=quote.pk).update(
        purchase={name: value for name, value in quote.purchase.items() if name not in {"retries", "on_hang"}}
    )
    answer = text(owner_page.get(reverse("training_new"), {"rerun": job.pk}))
    assert '<details class="fold mt-4" id="advanced">' in answer


def test_how_much_is_free_is_said_where_it_means_something(
    customer: Customer, owner_page: Client, monkeypatch: pytest.MonkeyPatch
):
    assert "free now" in text(owner_page.get(reverse("training_new")))
    monkeypatch.setattr(customer.backend, "capacity", lambda: Capacity((), elastic=True))
    assert "free now" not in text(owner_page.get(reverse("training_new")))


def test_the_quote_says_what_it_means_for_the_price(customer: Customer, owner_page: Client):
    form = customer.form(touched=TOUCHED, retries="2", min_nodes="1", on_hang="ignore", max_time="30")
    answer = text(owner_page.post(reverse("training_quote"), form))
    assert "2 retries are included." in answer
    assert "with 1 of 2 nodes" in answer
    assert "Hangs are not watched for" in answer
    wrong = text(owner_page.post(reverse("training_quote"), customer.form(touched=TOUCHED, on_hang="retry")))
    assert "buy at least one retry" in wrong


def test_attempts_tell_what_was_paid_and_lost(customer: Customer, owner_page: Client):
    began = time.time() - 2000
    attempt = customer.started(at=began, retries=1, retry_backoff_seconds=0)
    customer.backend.progress(attempt.run_name, at=began + 700, checkpoint=True)
    job = customer.end(attempt, Outcome.CODE_FAILED, at=began + 760)
    shown = page(owner_page, job)
    assert "The code failed" in shown
    assert "since its last checkpoint" in shown
    assert "1 min 00 s" in shown
    assert "It ended: code_failed." not in shown  # the cluster's own English is for logs


def test_the_stacks_of_a_hang_are_there_for_members_alone(customer: Customer, owner_page: Client):
    began = time.time() - 2000
    attempt = customer.started(at=began)
    customer.backend.hang(attempt.run_name, at=began + 500, progress_at=began + 300)
    customer.backend.runs[attempt.run_name].stacks = {
        0: 'Thread 0x1:\n  File "gloo.py", line 1 in wait\n\nCurrent thread 0x2 (most recent call first):\n'
        '  File "/workspace/train.py", line 8 in step\n',
        1: "<script>alert(1)</script>",
    }
    dispatch.reconcile()
    shown = page(owner_page, attempt.job)
    address = reverse("job_stacks", args=[attempt.job_id, 1])
    assert f'hx-get="{address}"' in shown
    stacks = text(owner_page.get(address))
    assert "Rank 0 stands in" in stacks
    assert "File &quot;/workspace/train.py&quot;, line 8 in step</code>" in stacks
    assert "<script>" not in stacks
    theirs = Customer(customer.backend).started()
    assert owner_page.get(reverse("job_stacks", args=[theirs.job_id, 1])).status_code == 404
    assert "No stack was taken" in text(owner_page.get(reverse("job_stacks", args=[attempt.job_id, 9])))


def test_an_elastic_run_shows_its_nodes_over_time(customer: Customer, owner_page: Client):
    began = time.time() - 1000
    attempt = customer.started(at=began, nodes=3, min_nodes=1)
    customer.backend.shrink(attempt.run_name, 2, at=began + 300)
    job = customer.end(attempt, Outcome.COMPLETED, at=began + 900)
    shown = page(owner_page, job)
    assert "3 × 5 min 00 s, 2 × 10 min 00 s" in shown
    assert "ranks restarted once" in shown


def test_one_click_checks_an_image(customer: Customer, owner_page: Client):
    assert "Check this image" in text(owner_page.get(reverse("image_list")))
    sent = {"image": "pytorch", "node_spec": "nano", "nodes": "2"}
    answer = owner_page.post(reverse("image_check"), sent)
    job = Job.objects.get()
    assert answer["Location"] == reverse("job_detail", args=[job.pk])
    shown = page(owner_page, job)
    assert "What was checked" in shown
    assert "not checked" in shown
    assert "Run again" not in shown
    customer.quota(max_checks_per_day=1)
    refused = text(owner_page.post(reverse("image_check"), sent, follow=True))
    assert "used its 1 free checks" in refused


def test_the_order_page_checks_with_what_is_in_the_form(customer: Customer, owner_page: Client):
    answer = owner_page.post(reverse("image_check"), customer.form(), headers={"hx-request": "true"})
    assert answer["HX-Redirect"] == reverse("job_detail", args=[Job.objects.get().pk])
    wrong = owner_page.post(reverse("image_check"), customer.form(nodes="0"), headers={"hx-request": "true"})
    assert "Give a whole number from 1" in text(wrong)


@pytest.mark.parametrize("route", ["telemetry", "stacks", "check"])
def test_the_api_has_them_too(customer: Customer, owner_page: Client, route: str):
    attempt = customer.started()
    answer = owner_page.get(f"/api/v1/jobs/{attempt.job_id}/{route}/")
    assert answer.status_code == 200
    assert owner_page.get("/api/v1/jobs/999999/telemetry/").status_code == 404
