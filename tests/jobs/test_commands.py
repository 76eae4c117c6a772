"""The management commands of jobs. `demo` is run whole by `.ci/run` (make demo ONCE=1); here are its parts."""

import io
import json
import signal
import stat

import httpx
import pytest
from django.core.management import call_command
from rich.console import Console

from console.accounts.models import ApiToken, Membership
from jobs.demo import Customer as Client
from jobs.demo import DemoFailed
from jobs.management.commands import demo, watch_runs
from jobs.models import Job, MetricPoint
from jobs.states import JobState
from runtime.specs import Outcome


@pytest.fixture(autouse=True)
def _own_signals():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.django_db
def test_seed_catalogue_says_what_it_did(backend):
    said = io.StringIO()
    call_command("seed_catalogue", stdout=said)
    call_command("seed_catalogue", stdout=said)
    assert said.getvalue().splitlines() == ["The starter catalogue is made.", "There is a catalogue already."]


class TestWatchRuns:
    def watch(self, backend, monkeypatch, *changes):
        """Let `watch_runs` see these changes, then a few heartbeats."""
        monkeypatch.setattr(watch_runs, "READ_EVERY_SECONDS", 0.0)
        monkeypatch.setattr(watch_runs, "close_old_connections", lambda: None)  # it is the test's own, in a transaction
        monkeypatch.setattr(backend, "changes", lambda: iter([*changes, set(), set()]))
        call_command("watch_runs")

    def test_what_a_run_wrote_and_how_it_ended_reach_its_job(self, customer, backend, monkeypatch):
        attempt = customer.started()
        backend.write(attempt.run_name, "epoch 1/10 loss 0.5\n")
        self.watch(backend, monkeypatch, {attempt.run_name})
        assert MetricPoint.objects.get().value == 0.5
        backend.end(attempt.run_name, Outcome.COMPLETED)
        self.watch(backend, monkeypatch, {attempt.run_name})
        assert Job.objects.get().state == JobState.SUCCEEDED

    def test_names_that_are_no_attempts_are_nothing(self, customer, backend, monkeypatch, caplog):
        attempt = customer.started()
        names = {"", "x", ".hidden", "job-1", "job-1-2-3", "job-x-1", "job-1-x", f"job-{attempt.job_id}-9", "bench-1-1"}
        self.watch(backend, monkeypatch, names)
        assert not caplog.records
        assert Job.objects.get().state == JobState.RUNNING

    def test_a_fault_of_one_run_is_logged_and_the_others_go_on(self, customer, backend, monkeypatch, caplog):
        broken, fine = customer.started(nodes=1), customer.started(nodes=1)
        for attempt in (broken, fine):
            backend.end(attempt.run_name, Outcome.COMPLETED)
        describe = backend.describe

        def fail(name):
            if name == broken.run_name:
                raise ZeroDivisionError
            return describe(name)

        monkeypatch.setattr(backend, "describe", fail)
        self.watch(backend, monkeypatch, {broken.run_name}, {fine.run_name})
        assert "could not be taken in" in caplog.text
        assert Job.objects.get(pk=fine.job_id).state == JobState.SUCCEEDED

    def test_a_run_that_writes_without_pause_is_not_read_at_each_write(self, customer, backend, monkeypatch):
        attempt = customer.started()
        looks = []
        monkeypatch.setattr(watch_runs.Command, "_look", lambda _self, name: looks.append(name))
        monkeypatch.setattr(watch_runs, "READ_EVERY_SECONDS", 60.0)
        monkeypatch.setattr(backend, "changes", lambda: iter([{attempt.run_name}] * 50))
        call_command("watch_runs")
        assert looks == [attempt.run_name]

    def test_its_end_is_taken_in_at_once(self, customer, backend, monkeypatch):
        attempt = customer.started()
        looks = []

        def changes():
            yield {attempt.run_name}
            backend.end(attempt.run_name, Outcome.COMPLETED)
            yield {attempt.run_name}

        monkeypatch.setattr(watch_runs.Command, "_look", lambda _self, name: looks.append(name))
        monkeypatch.setattr(watch_runs, "READ_EVERY_SECONDS", 60.0)
        monkeypatch.setattr(backend, "changes", changes)
        call_command("watch_runs")
        assert looks == [attempt.run_name] * 2


class TestDemo:
    def client(self, answer):
        made = Client("http://demo.example", "token", Console(quiet=True))
        made.http.close()
        made.http = httpx.Client(base_url="http://demo.example/api/v1/", transport=httpx.MockTransport(answer))
        return made

    def test_accounts_are_made_once_with_fresh_secrets(self, db):
        first = demo._accounts()
        second = demo._accounts()
        assert Membership.objects.count() == 2
        assert first["customer"]["email"] == second["customer"]["email"]
        assert first["customer"]["token"] != second["customer"]["token"]
        assert ApiToken.objects.filter(revoked_at=None).count() == 2
        admin = Membership.objects.get(user__email=first["administrator"]["email"]).user
        assert admin.is_superuser
        assert not Membership.objects.get(user__email=first["customer"]["email"]).user.is_staff
        assert admin.check_password(second["administrator"]["password"])

    def test_secrets_are_written_for_their_owner_alone(self, tmp_path):
        path = tmp_path / "demo.json"
        path.touch(mode=0o644)
        demo._write_private(path, {"a": 1})
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads(path.read_text()) == {"a": 1}

    @pytest.mark.parametrize(
        ("curves", "why"),
        [
            ({}, "no loss and accuracy"),
            ({"loss": [], "accuracy": []}, "no loss and accuracy"),
            ({"loss": [[1, 1.0], [2, 1.5]], "accuracy": [[1, 0.9]]}, "did not learn"),
            ({"loss": [[1, 1.0], [2, 0.5]], "accuracy": [[1, 0.2]]}, "did not learn"),
        ],
    )
    def test_a_run_that_did_not_learn_fails_the_demo(self, curves, why):
        client = self.client(lambda _request: httpx.Response(200, json={"metrics": curves}))
        with pytest.raises(DemoFailed, match=why):
            client.result(1)
        client.http.close()

    def test_an_error_of_the_api_fails_it_with_the_apis_sentence(self):
        client = self.client(lambda _request: httpx.Response(402, json={"message": "Your wallet is empty."}))
        with pytest.raises(DemoFailed, match=r"402.*Your wallet is empty"):
            client.buy()
        client.http.close()
