"""Traces as a receiver gets them: a real OTLP server over HTTP, real protobufs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from celery.app.trace import build_tracer
from django.core.management import call_command
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from console.celery import app
from console.operations import tracing, work
from jobs import dispatch, traces
from jobs.models import Job
from runtime.specs import Outcome
from tests.factories.jobs import Customer
from tests.fakes import FakeBackend

ROOT = Path(__file__).resolve().parents[3]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Receiver:
    """An OTLP collector on a free port: `spans()` gives what it got, by name."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
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
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def stop(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def resources(self):
        return [each.resource for request in self.requests for each in request.resource_spans]

    def all(self):
        tracing.flush()
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def spans(self):
        return {span.name: span for span in self.all()}


@pytest.fixture
def receiver():
    made = Receiver()
    tracing.start(endpoint=made.url)
    yield made
    tracing.flush()
    tracing._exporter._provider.shutdown()
    tracing.start(endpoint="")
    made.stop()


@pytest.fixture
def backend(monkeypatch, tmp_path):
    fake = FakeBackend(root=tmp_path / "runs")
    monkeypatch.setattr("jobs.backend.create", lambda _kind, **_options: fake)
    return fake


def facts(span):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def place(span):
    """A span's traceparent but for the flags, which are not sent along."""
    return f"00-{span.trace_id.hex()}-{span.span_id.hex()}"


def test_switched_off_nothing_is_imported_and_nothing_is_sent():
    program = (
        "import sys; from console.operations import tracing\n"
        "with tracing.span('x') as mark: mark.set(a=1); mark.fail('b')\n"
        "assert (tracing.current(), tracing.trace_id(), tracing.is_on()) == ('', '', False)\n"
        # redis-py brings OpenTelemetry's metrics along wherever they are installed: they are not of our doing
        "ours = ('opentelemetry.exporter', 'opentelemetry.sdk.trace', 'console.operations.exporting')\n"
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "-v0", "-c", program], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"}, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_asked_for_without_the_packages_a_process_says_what_to_install(monkeypatch):
    def missing(_name):
        raise ModuleNotFoundError("No module named 'opentelemetry'", name="opentelemetry.sdk")

    monkeypatch.setattr(tracing, "import_module", missing)
    with pytest.raises(tracing.TracingMissing, match=r"trainyard\[tracing\]"):
        tracing.start(endpoint="http://127.0.0.1:4318")


def test_a_settings_variable_switches_it_on(tmp_path):
    program = "from console.operations import tracing; print(tracing.is_on())"
    for endpoint, on in (("http://127.0.0.1:9", "True"), ("", "False")):
        done = subprocess.run(
            [sys.executable, "manage.py", "shell", "-v0", "-c", program], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "TRAINYARD_VAR": str(tmp_path)}, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == on


def test_a_place_is_known_before_its_span():
    assert tracing.child(PARENT, "job-7-1") == tracing.child(PARENT, "job-7-1") != tracing.child(PARENT, "job-7-2")
    assert tracing.TRACEPARENT.fullmatch(tracing.child(PARENT, "job-7-1"))
    assert tracing.child(PARENT, "job-7-1")[:36] == PARENT[:36]
    assert tracing.child("", "job-7-1") == ""
    assert [tracing.sane(each) for each in (PARENT, "00-0-0-01", None, f"00-{'0' * 32}-{'1' * 16}-01")] == [
        PARENT,
        "",
        "",
        "",
    ]


@pytest.mark.django_db
def test_a_request_is_a_trace_of_its_own_linked_to_the_strangers(client, owner, receiver):
    client.force_login(owner.user)
    client.get("/jobs/4711/", headers={"traceparent": PARENT})
    span = receiver.spans()["GET"]
    assert span.trace_id.hex() != PARENT[3:35]
    assert span.links[0].trace_id.hex() == PARENT[3:35]
    assert not span.parent_span_id
    found = facts(span)
    assert found["http.route"] == "jobs/<int:pk>/"
    assert found["http.response.status_code"] == 404
    assert found["trainyard.user"] == owner.user_id
    [name] = {
        value.value.string_value
        for each in receiver.resources()
        for value in each.attributes
        if value.key == "service.name"
    }
    assert name == "trainyard"


@pytest.mark.django_db(transaction=True)
def test_from_the_click_to_each_rank_it_is_one_trace(api, backend, receiver, monkeypatch, shared):
    customer = Customer(backend)
    messages = []
    monkeypatch.setattr("console.accounts.hints._send", lambda task, arguments: messages.append((task, publish())))

    def publish():
        headers = {}
        work._send_along(headers=headers)
        return headers

    # the click
    client = api(customer.membership)
    quote = client.post("/api/v1/quotes/", customer.form()).json()["id"]
    client.post("/api/v1/orders/", {"quote": quote})
    job = Job.objects.get()
    # the worker, which got the message
    task, headers = messages[-1]
    assert task.name == "jobs.tasks.dispatch_queue"
    build_tracer(task.name, task, app=app)("id-1", (), {}, {"id": "id-1", "task": task.name, **headers})
    # the cluster
    attempt = job.attempts.get()
    job.refresh_from_db()
    assert job.traceparent
    told = backend.runs[attempt.run_name].spec
    ranks = [backend.environment(told, rank)["TRACEPARENT"] for rank in range(2)]
    backend.start(attempt.run_name)
    dispatch.reconcile_job(job_pk=job.pk)
    backend.end(attempt.run_name, Outcome.CODE_FAILED)
    dispatch.reconcile_job(job_pk=job.pk)

    click = next(span for span in receiver.all() if facts(span).get("http.route") == "api/v1/orders/")
    spans = {span.name: span for span in receiver.all() if span.trace_id == click.trace_id}
    run = f"run {attempt.run_name}"
    assert set(spans) == {
        "POST", "task jobs.tasks.dispatch_queue", "dispatch.submit", run, "queue", "start", "rank 0", "rank 1",
    }  # fmt: skip
    above = {
        name: next((each.name for each in spans.values() if each.span_id == span.parent_span_id), "")
        for name, span in spans.items()
    }
    assert above == {
        "POST": "", "task jobs.tasks.dispatch_queue": "POST", "dispatch.submit": "task jobs.tasks.dispatch_queue",
        run: "POST", "queue": run, "start": run, "rank 0": run, "rank 1": run,
    }  # fmt: skip
    # what the ranks were told is the run's own place
    assert [each[:52] for each in ranks] == [place(spans[run])] * 2
    assert ranks == [told.traceparent] * 2
    assert facts(spans["rank 1"])["trainyard.rank"] == 1
    assert facts(spans[run])["trainyard.reason"] == "code_failed"
    assert spans[run].status.code == Status.STATUS_CODE_ERROR
    attempt.refresh_from_db()
    assert spans["start"].end_time_unix_nano / 1e9 == pytest.approx(attempt.started_at.timestamp(), abs=1e-3)
    assert spans["rank 0"].end_time_unix_nano / 1e9 == pytest.approx(attempt.finished_at.timestamp(), abs=1e-3)
    assert spans["queue"].start_time_unix_nano / 1e9 == pytest.approx(job.queued_at.timestamp(), abs=1e-3)


def test_a_run_that_the_sweep_started_belongs_to_its_buyers_trace(
    db, backend, receiver, shared, django_capture_on_commit_callbacks
):
    customer = Customer(backend)
    job = customer.job()
    Job.objects.filter(pk=job.pk).update(traceparent=PARENT)
    with tracing.span("task jobs.tasks.reconcile", kind="consumer"), django_capture_on_commit_callbacks(execute=True):
        dispatch.reconcile()
    submit, sweep = receiver.spans()["dispatch.submit"], receiver.spans()["task jobs.tasks.reconcile"]
    assert (submit.trace_id.hex(), submit.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])
    assert submit.links[0].span_id == sweep.span_id


def test_each_attempt_has_its_own_place_and_waits_since_the_last_one_ended(db, backend, shared):
    customer = Customer(backend)
    first = customer.started()
    Job.objects.filter(pk=first.job_id).update(traceparent=PARENT)
    job = customer.end(first, Outcome.NODE_LOST)
    dispatch.start(job)
    second = job.attempts.get(number=2)
    backend.start(second.run_name)
    dispatch.reconcile_job(job_pk=job.pk)
    customer.end(second, Outcome.COMPLETED)
    first.refresh_from_db()
    second.refresh_from_db()
    [run, queue, *_], lost = traces.spans(second), traces.spans(first)[0]
    assert run.place != lost.place
    assert queue.started_at == first.finished_at.timestamp()
    assert (run.error, lost.error) == ("", "node_lost")
    assert lost.attributes["trainyard.platform_fault"] is True


def test_untraced_jobs_tell_their_ranks_nothing(db, backend, shared):
    attempt = Customer(backend).started()
    spec = backend.runs[attempt.run_name].spec
    assert spec.traceparent == ""
    assert "TRACEPARENT" not in backend.environment(spec, 0)


def test_spans_of_a_process_that_was_forked_arrive(receiver):
    child = os.fork()
    if child == 0:  # pragma: no cover  # another process
        with tracing.span("in the child"):
            pass
        tracing.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert "in the child" in receiver.spans()


def test_a_receiver_that_is_away_harms_nothing(receiver, caplog):
    receiver.server.server_close()
    with tracing.span("lost"):
        assert tracing.current()


def test_commands_work_where_traces_are_on(receiver):
    call_command("check", verbosity=0)
