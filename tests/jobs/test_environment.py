"""Environment variables, secrets and references in arguments: from the order to the run."""

import pytest

from billing.models import Quote
from jobs import free_estimates, orders, selectors
from jobs.errors import ChoiceUnavailable
from jobs.models import Job
from jobs.purchase import EXPANDS_ARGUMENTS, parse
from jobs.run_specs import launch_spec, run_spec
from runtime.errors import InvalidSpec
from runtime.specs import Outcome
from storage import secret_store
from storage.errors import InUse
from storage.models import Secret
from tests.factories.jobs import start

pytestmark = pytest.mark.django_db
VALUE = "s3cr3t-of-the-test"


def save(customer, name="API_TOKEN", value=VALUE):
    return secret_store.save_secret(organization=customer.organization, name=name, value=value)[0]


def test_forms_and_json_are_read_alike(customer):
    save(customer, "ONE")
    save(customer, "TWO")
    for environment in ({"A": "x y=z ", "N": 3}, "A=x y=z \r\n\r\nN=3\r\n"):
        for secrets in (["ONE", "TWO"], "ONE, TWO"):
            form = customer.form(environment=environment, secrets=secrets, arguments="--lr $LR '$A $$'")
            purchase = parse(organization=customer.organization, data=form)
            assert purchase.environment == {"A": "x y=z ", "N": "3"}
            assert purchase.secrets == ("ONE", "TWO")
            assert purchase.arguments == ("--lr", "$LR", "$A $$")
            assert parse(organization=customer.organization, data=purchase.to_json()) == purchase


REFUSED = [
    ({"environment": {"RANK": "1"}}, "environment", "sets RANK itself"),
    ({"environment": "PYTHONHOME=/x"}, "environment", "sets PYTHONHOME itself"),
    ({"environment": {"A-B": "1"}}, "environment", "not a variable name"),
    ({"environment": "A"}, "environment", "Line 1"),
    ({"environment": "A=1\nA=2"}, "environment", "set twice"),
    ({"environment": {"A": "1\n2"}}, "environment", "one line"),
    ({"environment": {"A": "\ud800"}}, "environment", "one line"),  # of valid characters
    ({"environment": {"A": None}}, "environment", "must be a string"),
    ({"environment": {f"A{n}": "" for n in range(101)}}, "environment", "at most 100"),
    ({"environment": {"A": "x" * 33_000}}, "environment", "32768 bytes"),
    ({"secrets": ["NONE"]}, "secrets", "no secret NONE"),
    ({"secrets": ["a\0"]}, "secrets", "no secret"),
    ({"secrets": ["API_TOKEN"] * 2}, "secrets", "only once"),
    ({"secrets": {"API_TOKEN": 1}}, "secrets", "list of names"),
    ({"secrets": ["API_TOKEN"], "environment": {"API_TOKEN": "x"}}, "secrets", "also an environment variable"),
    ({"arguments": ["$UNKNOWN"]}, "arguments", "UNKNOWN"),
    ({"arguments": ["${LR"]}, "arguments", "${NAME}"),
    ({"arguments": ["$API_TOKEN"], "secrets": ["API_TOKEN"]}, "arguments", "can't contain the secret"),
    ({"arguments": ["$A" * 4], "environment": {"A": "x" * 30_000}}, "arguments", "too long"),
    ({"arguments": ["$A" * 5], "environment": {"A": "🚂" * 8000}}, "arguments", "too long"),  # 160,000 bytes
]  # fmt: skip


def test_a_refusal_names_the_field_and_the_reason(customer, other):
    save(other, "NONE")  # exists, but not in the customer's organization
    save(customer)
    for changes, field, words in REFUSED:
        errors = customer.refusals(**changes)
        assert list(errors) == [field], changes
        assert words in errors[field]


def test_a_run_gets_the_secret_values_at_the_time_of_its_start(customer):
    save(customer)
    job = customer.job(environment={"NCCL_DEBUG": "INFO"}, secrets=["API_TOKEN"], arguments=["$LR"])
    start(job)
    first = job.attempts.get()
    assert run_spec(first).secrets == {}, "the stored spec has no secrets"
    assert launch_spec(first).secrets == {"API_TOKEN": VALUE}
    save(customer, value="changed-meanwhile")
    spec = launch_spec(first)
    assert spec.secrets == {"API_TOKEN": "changed-meanwhile"}
    assert (spec.environment, spec.expands_arguments, spec.arguments) == ({"NCCL_DEBUG": "INFO"}, True, ("$LR",))


def test_a_secret_of_an_open_job_stays_and_a_quote_whose_secret_was_deleted_is_not_sold(customer, other):
    secret, foreign = save(customer), save(other)
    attempt = customer.started(secrets=["API_TOKEN"])
    quote = customer.quote(secrets=["API_TOKEN"])
    with pytest.raises(InUse, match=f"#{attempt.job_id}"):
        secret_store.delete_secret(secret=secret)
    secret_store.delete_secret(secret=foreign)  # the same name in another organization
    customer.end(attempt, Outcome.COMPLETED)
    secret_store.delete_secret(secret=secret)
    assert not Secret.objects.exists()
    with pytest.raises(ChoiceUnavailable):
        customer.place(quote)
    assert Job.objects.count() == 1


def test_a_secret_that_no_key_decrypts_ends_the_run_free(customer, settings):
    save(customer)
    job = customer.job(secrets=["API_TOKEN"])
    settings.SECRET_KEY = "another-key"
    assert start(job) is False
    job.refresh_from_db()
    assert (job.state, job.reason) == ("failed", "platform_error")  # a retry could not decrypt it either
    with pytest.raises(InvalidSpec, match="API_TOKEN"):
        launch_spec(job.attempts.get())


def test_dollar_signs_of_older_orders_keep_their_meaning(customer):
    """An earlier version of Trainyard stored arguments without `expands_arguments`, and passed them unchanged."""
    quote = customer.quote(arguments="--path $$HOME a$")
    quote.purchase = {**quote.purchase, "arguments": ["--path", "$HOME", "a$"]}
    for name in (EXPANDS_ARGUMENTS, "environment", "secrets"):
        del quote.purchase[name]
    quote.save()
    job = customer.place(quote).job
    escaped = (["--path", "$$HOME", "a$$"], True)  # the same arguments as they are written now
    assert (job.arguments, job.expands_arguments) == escaped
    # A job that the earlier version created:
    Job.objects.filter(pk=job.pk).update(expands_arguments=False, arguments=quote.purchase["arguments"])
    job.refresh_from_db()
    start(job)
    spec = run_spec(job.attempts.get())
    assert (spec.arguments, spec.expands_arguments) == (("--path", "$HOME", "a$"), False)
    again = orders.rerun(membership=customer.membership, job=job, changes={}).job
    assert (again.arguments, again.expands_arguments) == escaped


def test_the_quote_says_the_learning_rate_that_the_code_gets(customer, api):
    client = api(customer.membership)
    form = customer.form(lr="0.1", lr_scaling="linear", warmup_epochs=3, nodes=3, workers_per_node=2, notes="A\r\nB")
    quoted = client.post("/api/v1/quotes/", form).json()
    assert (quoted["learning_rate"], quoted["global_batch_size"]) == ("0.6", 192)  # of 6 ranks: 6 times 0.1, 6 times 32
    job = customer.place(Quote.objects.get(pk=quoted["id"])).job
    seen = selectors.environment(job)
    assert {name: seen[name] for name in ("LR", "LR_BASE", "LR_WARMUP_EPOCHS")} == {
        "LR": "0.6", "LR_BASE": "0.1", "LR_WARMUP_EPOCHS": "3",
    }  # fmt: skip
    assert job.notes == "A\nB"
    again = orders.rerun(membership=customer.membership, job=job, changes={"nodes": 1}).job
    assert (again.lr_scaling, again.warmup_epochs, selectors.environment(again)["LR"]) == ("linear", 3, "0.2")
    too_long = form | {"warmup_epochs": 11}  # the training has 10 epochs
    assert client.post("/api/v1/quotes/", too_long).json()["fields"].keys() == {"warmup_epochs"}


def test_the_environment_is_known_before_the_purchase(customer, api):
    save(customer, "API_TOKEN")
    chosen = {"framework": "horovod", "image": "horovod", "environment": {"OWN": "1"}, "secrets": ["API_TOKEN"]}
    (customer.folder / "train.py").write_text('parser.add_argument("--local-rank", type=int)')
    quote = customer.quote(**chosen, arguments=["--lr=$LR", "$OWN", "$$"], lr_scaling="linear")
    answer = api(customer.membership).get(f"/api/v1/quotes/{quote.pk}/environment/?rank=1").json()
    # 0.01 for each of the two ranks, which are on two nodes.
    assert answer["arguments"] == ["--lr=0.02", "1", "$", "--local-rank=0"]
    environment = answer["environment"]
    assert environment.pop("API_TOKEN") == "***"
    job = customer.place(quote).job
    seen = selectors.environment(job, 1)
    # Before the purchase the job has no number yet, and names of nodes have 0 in its place.
    numbered = {name for name in seen if seen[name] != environment[name]}
    assert {name: seen[name].replace(f"job-{job.pk}-", "job-0-") for name in numbered} == {
        name: environment[name] for name in numbered
    }
    assert seen.keys() == environment.keys()  # only the API adds the names of secrets, with *** as their values
    assert api(customer.membership).get(f"/api/v1/quotes/{quote.pk}/environment/?rank=2").status_code == 404
    estimate = free_estimates.order_free_estimate(membership=customer.membership, data=customer.form(nodes=8))
    preview = api(customer.membership).get(f"/api/v1/quotes/{estimate.quote.pk}/environment/").json()["environment"]
    assert preview["WORLD_SIZE"] == "1"  # its own node, not those of the run that it measures
