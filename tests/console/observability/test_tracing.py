"""Traces as a collector gets them: in protobufs by OTLP over HTTP."""

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from celery.app.trace import build_tracer
from django.apps import apps
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.trace import SpanKind

from console.celery import app
from console.observability import celery_signals, tracing
from jobs import reconciliation, traces
from jobs.models import Job
from runtime.specs import Outcome
from tests.factories.jobs import Customer
from tests.http_server import serving

ROOT = Path(__file__).resolve().parents[3]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""A `traceparent` header: a version, the trace's id (PARENT[3:35]), a span's id (PARENT[36:52]) and flags."""
USE_TRACING_WITHOUT_SETTING = """
import sys
from console.observability import tracing
with tracing.span("x") as span:
    span.set_attribute("a", 1)
    tracing.mark_failed(span, "b")
assert (tracing.current_traceparent(), tracing.trace_id(), tracing.is_on()) == ("", "", False)
# redis-py imports OpenTelemetry's metrics wherever they are installed.
for_tracing_only = ("opentelemetry.exporter", "opentelemetry.sdk.trace", "console.observability.otlp")
print([name for name in sys.modules if name.startswith(for_tracing_only)])
"""


class Receiver:
    """An OTLP collector on a free port."""

    def __init__(self):
        self.requests = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                receiver.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def resources(self):
        tracing.flush()
        return [resource for request in self.requests for resource in request.resource_spans]

    def all(self):
        """Return the received spans."""
        return [span for resource in self.resources() for scope in resource.scope_spans for span in scope.spans]

    def spans(self):
        """Return the received spans by name."""
        return {span.name: span for span in self.all()}


@pytest.fixture
def receiver(monkeypatch):
    """A Receiver to which this process sends its spans."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    created = Receiver()
    with serving(created.server):
        tracing.start(endpoint=created.url)
        yield created
        tracing.flush()
        tracing._provider.shutdown()
        tracing.start(endpoint="")


def attributes(holder):
    """Return the attributes of a span or a resource by name."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes}


def test_a_setting_switches_traces_on_and_without_it_nothing_is_imported(tmp_path, settings):
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "-v0", "-c", USE_TRACING_WITHOUT_SETTING],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"TRAINYARD_VAR": str(tmp_path)}, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
    settings.OTEL_EXPORTER_OTLP_ENDPOINT = "http://127.0.0.1:9"  # where nothing listens
    apps.get_app_config("console").ready()
    is_on = tracing.is_on()
    tracing.start(endpoint="")  # off again, for the tests after this one
    assert is_on


def test_without_the_packages_a_process_says_what_to_install(monkeypatch):
    def missing(_name):
        raise ModuleNotFoundError("No module named 'opentelemetry'", name="opentelemetry.sdk")

    monkeypatch.setattr(tracing, "import_module", missing)
    with pytest.raises(tracing.TracingMissing, match=r"requirements/production\.txt"):
        tracing.start(endpoint="http://127.0.0.1:4318")


def test_the_id_of_a_span_is_known_before_it_is_exported():
    child = tracing.child_traceparent(PARENT, "job-7-1")
    assert child == tracing.child_traceparent(PARENT, "job-7-1") != tracing.child_traceparent(PARENT, "job-7-2")
    assert tracing.TRACEPARENT.fullmatch(child)
    assert child[:36] == PARENT[:36]  # the version and the trace
    assert tracing.child_traceparent("", "job-7-1") == ""
    malformed = ("x", "00-0-0-01", None, f"00-{'0' * 32}-{'1' * 16}-01")
    assert [tracing.valid_traceparent(each) for each in (PARENT, *malformed)] == [PARENT, *[""] * 4]


@pytest.mark.django_db
def test_a_request_is_a_trace_of_its_own_linked_to_the_clients(client, owner, receiver):
    client.force_login(owner.user)
    client.get("/jobs/4711/", headers={"traceparent": PARENT})
    span = receiver.spans()["GET"]
    assert span.trace_id.hex() != PARENT[3:35] == span.links[0].trace_id.hex()
    assert not span.parent_span_id
    assert attributes(span).items() >= {
        "http.route": "jobs/<int:pk>/", "http.response.status_code": 404, "trainyard.user": owner.user_id,
    }.items()  # fmt: skip
    assert {attributes(each.resource)["service.name"] for each in receiver.resources()} == {"trainyard"}


@pytest.mark.usefixtures("redis_keys")
@pytest.mark.django_db(transaction=True)
def test_an_order_is_one_trace_down_to_each_rank(api, backend, receiver, monkeypatch):
    customer = Customer(backend)
    messages = []

    def publish(task, _arguments):
        headers = {}
        celery_signals._add_header(headers=headers)
        messages.append((task, headers))

    monkeypatch.setattr("console.core.enqueue._send_or_warn", publish)
    client = api(customer.membership)
    quote = client.post("/api/v1/quotes/", customer.form()).json()["id"]
    client.post("/api/v1/orders/", {"quote": quote})
    task, headers = messages[-1]  # run it for the cluster `default` with its headers, as a worker does
    build_tracer(task.name, task, app=app)("id-1", ("default",), {}, {"id": "id-1", "task": task.name, **headers})
    job = Job.objects.get()
    attempt = job.attempts.get()
    spec = backend.runs[attempt.run_name].spec
    ranks = [backend.environment(spec, rank)["TRACEPARENT"] for rank in range(2)]
    backend.start(attempt.run_name)
    reconciliation.reconcile_job(job_pk=job.pk)
    backend.end(attempt.run_name, Outcome.CODE_FAILED)
    reconciliation.reconcile_job(job_pk=job.pk)
    attempt.refresh_from_db()

    order_span = next(span for span in receiver.all() if attributes(span).get("http.route") == "api/v1/orders/")
    spans = {span.name: span for span in receiver.all() if span.trace_id == order_span.trace_id}
    parents = {
        name: next((each.name for each in spans.values() if each.span_id == span.parent_span_id), "")
        for name, span in spans.items()
    }
    run = f"run {attempt.run_name}"
    assert parents == {
        "POST": "", "task jobs.dispatch.dispatch": "POST", "dispatch.submit": "task jobs.dispatch.dispatch",
        run: "POST", "queue": run, "start": run, "rank 0": run, "rank 1": run,
    }  # fmt: skip
    assert ranks == [spec.traceparent] * 2
    assert spec.traceparent[:52] == f"00-{order_span.trace_id.hex()}-{spans[run].span_id.hex()}"
    assert attributes(spans["rank 1"])["trainyard.rank"] == 1
    assert attributes(spans[run])["trainyard.reason"] == "code_failed"
    assert spans[run].status.code == Status.STATUS_CODE_ERROR
    for nanoseconds, at in (
        (spans["start"].end_time_unix_nano, attempt.started_at),
        (spans["rank 0"].end_time_unix_nano, attempt.finished_at),
        (spans["queue"].start_time_unix_nano, job.queued_at),
    ):
        assert nanoseconds / 1e9 == pytest.approx(at.timestamp(), abs=1e-3)


@pytest.mark.usefixtures("redis_keys")
def test_a_run_that_reconciliation_starts_belongs_to_its_orders_trace(
    customer, receiver, django_capture_on_commit_callbacks
):
    Job.objects.filter(pk=customer.job().pk).update(traceparent=PARENT)
    with (
        tracing.span("task jobs.tasks.reconcile", kind=SpanKind.CONSUMER),
        django_capture_on_commit_callbacks(execute=True),
    ):
        reconciliation.reconcile()
    submit, reconcile = receiver.spans()["dispatch.submit"], receiver.spans()["task jobs.tasks.reconcile"]
    assert (submit.trace_id.hex(), submit.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])
    assert submit.links[0].span_id == reconcile.span_id


@pytest.mark.usefixtures("redis_keys")
def test_each_attempt_has_its_own_span_and_its_queue_begins_when_the_last_one_ended(customer, backend):
    first = customer.started()
    assert "TRACEPARENT" not in backend.environment(backend.runs[first.run_name].spec, 0)  # the job is not traced yet
    Job.objects.filter(pk=first.job_id).update(traceparent=PARENT)
    job = customer.end(first, Outcome.NODE_LOST)
    second = customer.run(job)
    customer.end(second, Outcome.COMPLETED)
    first.refresh_from_db()
    second.refresh_from_db()
    [run, queue, *_], lost = traces.spans(second), traces.spans(first)[0]
    assert run.traceparent != lost.traceparent
    assert queue.started_at == first.finished_at.timestamp()
    assert (run.error, lost.error) == ("", "node_lost")
    assert lost.attributes["trainyard.platform_fault"] is True


def test_spans_of_a_forked_process_arrive(receiver):
    child = os.fork()
    if child == 0:  # pragma: no cover  # another process
        with tracing.span("in the child"):
            pass
        tracing.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert "in the child" in receiver.spans()


def test_a_span_needs_no_receiver(receiver):
    receiver.server.server_close()
    with tracing.span("lost"):
        assert tracing.current_traceparent()
