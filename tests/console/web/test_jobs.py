"""Advanced options of the training form, and the page of a job: attempts, stacks, telemetry."""

import re
import time

from django.urls import reverse

from billing.models import Quote
from jobs import dispatch, free_estimates, reconciliation, selectors
from runtime.specs import Capacity, LocalRankArgument, Outcome
from tests.factories.jobs import start
from tests.factories.notebooks import sell_notebook

TOUCHED = "code_path,datasets,epochs,lr,batch_size,nodes,retries,on_hang,min_nodes,controller,local_rank_argument"
"""Fields that the customer has edited. Errors of other fields are not shown yet."""
CLOSED = '<details class="fold mt-4" id="advanced">'
OPEN = '<details class="fold mt-4" id="advanced" open>'
"""How the form begins its advanced options."""


def text(answer):
    return re.sub(r"\s+", " ", answer.text)


def page(client, job, **query):
    return text(client.get(reverse("job_detail", args=[job.pk]), query))


def rerun(client, job):
    return text(client.get(reverse("training_new"), {"rerun": job.pk}))


def quote(client, customer, **changes):
    return text(client.post(reverse("training_quote"), customer.form(touched=TOUCHED, **changes)))


def test_the_advanced_options_are_open_for_a_rerun_that_uses_them(customer, owner_page, monkeypatch):
    new = text(owner_page.get(reverse("training_new")))
    assert CLOSED in new
    assert "free now" in new
    monkeypatch.setattr(customer.backend, "capacity", lambda: Capacity((), elastic=True))
    assert "free now" not in text(owner_page.get(reverse("training_new")))  # an elastic cluster starts nodes
    assert CLOSED in text(owner_page.get(reverse("training_new"), {"retries": "0"}))  # the default, as text
    form = rerun(owner_page, customer.job(retries=2, retry_backoff_seconds=7, on_hang="retry", min_nodes=1))
    for part in (
        OPEN, '<option value="2" selected>2</option>', '<option value="retry" selected>',
        'name="min_nodes" inputmode="numeric" placeholder="all" value="1"',
    ):  # fmt: skip
        assert part in form
    old = customer.job()  # of a release without these options
    bought = old.order.quote.purchase
    kept = {name: bought[name] for name in bought if name not in {"retries", "on_hang", "local_rank_argument"}}
    type(old.order.quote).objects.filter(pk=old.order.quote_id).update(purchase=kept)
    assert CLOSED in rerun(owner_page, old)


def test_the_local_rank_argument_is_chosen_kept_and_passed_to_the_cluster(customer, owner_page):
    job = customer.job(local_rank_argument="dash")
    start(job)
    assert customer.backend.runs[f"job-{job.pk}-1"].spec.local_rank_argument is LocalRankArgument.DASH
    form = rerun(owner_page, job)
    assert OPEN in form
    assert '<option value="dash" selected>--local-rank=N</option>' in form
    assert "<dd>--local-rank=N</dd>" in page(owner_page, job)
    assert selectors.summary(job)["local_rank_argument"] == "dash"
    assert "Choose one of: auto, underscore, dash, none." in quote(owner_page, customer, local_rank_argument="both")


def test_a_quote_explains_the_price_of_its_options(customer, owner_page):
    shown = quote(owner_page, customer, retries="2", min_nodes="1", on_hang="ignore", max_time="30")
    for sentence in ("2 retries are included.", "with 1 of 2 nodes", "Hang detection is off"):
        assert sentence in shown
    assert "Set at least one retry" in quote(owner_page, customer, on_hang="retry")


def test_a_dataset_that_the_script_reads_and_nobody_uploaded_is_named_before_buying(customer, owner_page):
    customer.write("train.py", 'import os\nprint(os.listdir(os.path.join(os.environ["DATASETS_PATH"], "digits")))')
    sentence = "train.py reads the dataset digits, which your organization does not have."
    card = quote(owner_page, customer)
    assert card.index(sentence) < card.index('id="buy"')
    api = owner_page.post("/api/v1/quotes/", customer.form(), content_type="application/json").json()
    assert api["warnings"] == [f"{sentence} Upload it first."]


def test_a_starting_job_says_what_it_waits_for(customer, backend, owner_page):
    job = customer.job()
    dispatch.dispatch_queue()
    backend.wait(f"job-{job.pk}-1", "image_credentials", image="r.example/<b>:1\0")
    reconciliation.reconcile()
    shown = page(owner_page, job)
    assert "The registry denied access to the image r.example/&lt;b&gt;:1\ufffd." in shown
    assert "Nothing is charged yet." in shown


def test_a_platform_fault_after_a_paid_attempt_is_not_called_free(customer, owner_page):
    attempt = customer.started(at=time.time() - 60, retries=1, retry_backoff_seconds=0)
    job = customer.end(attempt, Outcome.CODE_FAILED)
    for number in range(2, 5):
        job = start(job) and job.attempts.get(number=number).job
        assert "Nothing is charged yet." not in page(owner_page, job)
        job = customer.end(job.attempts.get(number=number), Outcome.NODE_LOST)
    shown = page(owner_page, job)
    assert "You pay for the time that earlier attempts used" in shown
    assert "you pay for the time used" in shown
    assert not re.search("this run is free|The run is free", shown)
    assert selectors.receipt(job).total_minor > 0


def test_a_failed_attempt_shows_the_time_lost_since_its_checkpoint(customer, owner_page):
    started_at = time.time() - 2000
    attempt = customer.started(at=started_at, retries=1, retry_backoff_seconds=0)
    customer.backend.progress(attempt.run_name, at=started_at + 700, checkpoint=True)
    shown = page(owner_page, customer.end(attempt, Outcome.CODE_FAILED, at=started_at + 760))
    for part in ("Code failed", "since its last checkpoint", "<div>1 min<div"):
        assert part in shown
    assert "It ended: code_failed." not in shown  # the cluster's own message is for logs


def test_the_stacks_of_a_hang_are_shown(customer, owner_page):
    started_at = time.time() - 2000
    attempt = customer.started(at=started_at)
    customer.backend.hang(attempt.run_name, at=started_at + 500, progress_at=started_at + 300)
    customer.backend.runs[attempt.run_name].stacks = {
        0: 'Thread 0x1:\n  File "gloo.py", line 1 in wait\n\nCurrent thread 0x2 (most recent call first):\n'
        '  File "/workspace/train.py", line 8 in step\n',
        1: "<script>alert(1)</script>",
    }
    reconciliation.reconcile()
    path = reverse("job_stacks", args=[attempt.job_id, 1])
    assert f'hx-get="{path}"' in page(owner_page, attempt.job)
    stacks = text(owner_page.get(path))
    assert "Rank 0 is in" in stacks
    assert "File &quot;/workspace/train.py&quot;, line 8 in step</code>" in stacks
    assert "<script>" not in stacks
    no_such_attempt = reverse("job_stacks", args=[attempt.job_id, 9])
    assert "No stack was captured" in text(owner_page.get(no_such_attempt))


def test_an_elastic_run_shows_its_nodes_over_time(customer, owner_page):
    started_at = time.time() - 1000
    attempt = customer.started(at=started_at, nodes=3, min_nodes=1)
    assert "Running on all nodes." in page(owner_page, attempt.job)
    customer.backend.shrink(attempt.run_name, 2, at=started_at + 300)
    reconciliation.reconcile()
    assert "Running on 2 of 3 nodes." in page(owner_page, attempt.job)
    job = customer.end(attempt, Outcome.COMPLETED, at=started_at + 900)
    shown = page(owner_page, job)
    assert "3 × 5 min, 2 × 10 min" in shown
    assert "ranks restarted once" in shown
    # The estimate beside the actual time.
    assert "data-outcome" in text(owner_page.get(reverse("job_detail", args=[job.pk]), {"tab": "cost"}))
    customer.quota(max_running_nodes=100)
    customer.started(node_spec="small", nodes=6)  # of the fake cluster's 8 cores
    few = customer.job(node_spec="small", nodes=4, min_nodes=2)
    dispatch.dispatch_queue()
    customer.backend.start(f"job-{few.pk}-1")
    reconciliation.reconcile()
    events = text(owner_page.get(reverse("job_detail", args=[few.pk]), {"tab": "events"}))
    assert "Running on 2 of 4 nodes. Charging starts now." in events


def test_a_cancel_says_what_it_costs_and_whether_code_can_write_a_checkpoint(customer, owner_page):
    queued, starting, running, retried = customer.job(), customer.job(), customer.started().job, customer.started(
        at=time.time() - 60, retries=1
    )  # fmt: skip
    start(starting)
    customer.backend.start(f"job-{starting.pk}-1")  # which the console has not observed yet
    retried = customer.end(retried, Outcome.CODE_FAILED)  # waits for its second attempt
    free = free_estimates.order_free_estimate(membership=customer.membership, data=customer.form()).job
    start(free)
    assert "This run is free." in page(owner_page, free, tab="cost")
    assert "Charging starts when all nodes run" in page(owner_page, running, tab="cost")
    checkpoint = "Your code has a short time to write a checkpoint."
    for job, question, answer in (
        (queued, "It has not started, so it is free.", "The run was cancelled. It was free."),
        (starting, "It is free if it ends before it starts.", "Cancelling."),
        (running, checkpoint, checkpoint),
        (retried, "You pay for the time used so far", "The run was cancelled. You pay for the time it used"),
        (free, 'data-confirm-detail="This run is free."', "Cancelling."),
    ):
        before = page(owner_page, job)
        after = text(owner_page.post(reverse("job_cancel", args=[job.pk]), follow=True))
        assert question in before
        assert answer in after
        assert "has not started" not in after
        assert (checkpoint in before, checkpoint in after) == (job is running, job is running)
        assert ("The job was cancelled." in after) == (job in {queued, retried})
    reconciliation.reconcile_job(job_pk=starting.pk)
    assert f"Cancelling. {checkpoint}" in page(owner_page, starting)
    job, notebook = customer.started().job, sell_notebook(customer).job
    Quote.objects.update(ceiling_minor=0)
    assert f"This run is free. {checkpoint}" in page(owner_page, job)
    assert "This run is free. What is saved stays in the workspace." in page(owner_page, notebook)


def test_a_tab_is_rendered_alone_in_its_page_and_in_a_refresh(customer, owner_page):
    job = customer.started().job
    for tab, words in (
        ("overview", "Learning rate"), ("logs", "log-rank"), ("nodes", "Exit code"), ("events", "Ordered."),
        ("cost", "Charging starts"), ("configuration", "Environment of rank 0"),
    ):  # fmt: skip
        assert words in text(owner_page.get(reverse("job_tab", args=[job.pk, tab]))), tab
        with_tab = text(owner_page.get(reverse("job_detail", args=[job.pk]), {"tab": tab}))
        assert words in with_tab, tab
        assert ("Learning rate" in with_tab) is (tab == "overview")
        # Logs have a stream of their own, and the configuration never changes.
        live = text(owner_page.get(reverse("job_live", args=[job.pk]), {"tab": tab}))
        assert (f'<div id="job-{tab}" hx-swap-oob="innerHTML">' in live) is (tab not in {"logs", "configuration"})
    assert owner_page.get(reverse("job_tab", args=[job.pk, "secrets"])).status_code == 404
