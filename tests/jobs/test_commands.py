"""The management commands of jobs. `demo` is run whole by `.ci/run` (make demo ONCE=1); here are its parts."""

import io
import json
import os
import signal
import stat

import httpx
import pytest
from django.core.management import call_command
from rich.console import Console

from console.accounts.models import ApiToken, Membership
from jobs import watching
from jobs.demo import Customer as Client
from jobs.demo import DemoFailed
from jobs.management.commands import demo


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
    def test_it_follows_until_it_is_told_to_stop(self, monkeypatch):
        seen = []

        def follow_all(stop):
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append(stop.wait(10))

        monkeypatch.setattr(watching, "follow_all", follow_all)
        call_command("watch_runs")
        assert seen == [True]


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
