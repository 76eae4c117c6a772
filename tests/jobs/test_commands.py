"""The management commands of jobs. `demo` is run whole by `.ci/run` (make demo ONCE=1); here are its parts."""

import io
import json
import os
import signal
import stat

import httpx
import pytest
import yaml
from django.core.management import CommandError, call_command
from rich.console import Console

from console.accounts.models import ApiToken, Membership
from jobs import watching
from jobs.demo import Customer as Client
from jobs.demo import DemoFailed
from jobs.management.commands import check_cluster, demo
from runtime.backends.base import Check
from runtime.backends.kubernetes_config import ClusterConfig


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


class TestCheckCluster:
    def check(self, *arguments):
        said = io.StringIO()
        try:
            call_command("check_cluster", *arguments, stdout=said)
        finally:
            self.text = said.getvalue()
        return self.text

    def test_each_line_with_its_remedy_and_an_error_where_one_is_amiss(self, monkeypatch):
        lines = [
            Check("sandbox", ok=True, detail="there"),
            Check("images", ok=False, detail="None.", remedy="Build one"),
        ]
        asked = []
        monkeypatch.setattr(
            check_cluster.local_check, "check", lambda _made, **given: asked.append(given) or iter(lines)
        )
        with pytest.raises(CommandError, match="1 of these lines"):
            self.check("default", "--no-smoke")
        for words in ("The cluster default", "✓", "sandbox", "✗", "Build one"):
            assert words in self.text
        assert asked[0]["smoke"] is False

    def test_one_of_kubernetes_is_looked_at_by_its_own(self, monkeypatch, settings):
        config = ClusterConfig.from_data("west", {"volume": {"claim": "runs", "root": "/srv"}})
        settings.TRAINYARD_CLUSTERS = {"here": None, "west": config}
        asked = []

        def look(*given, **options):
            asked.append((*given, options))
            return iter([Check("API server", ok=True, detail="1.36")])

        monkeypatch.setattr(check_cluster.kubernetes, "check", look)
        assert "1.36" in self.check("west")
        assert asked == [(config, settings.TRAINYARD_RUNS_ROOT / ".clusters" / "west", {"smoke": True})]

    def test_one_that_there_is_not_is_said(self):
        with pytest.raises(CommandError, match=r"names no cluster 'south'\. There are: default"):
            self.check("south")


class TestKubernetesRbac:
    def test_it_prints_roles_that_can_be_applied(self, settings):
        config = ClusterConfig.from_data("west", {"volume": {"claim": "runs", "root": "/srv"}, "namespace": "runs"})
        settings.TRAINYARD_CLUSTERS = {"here": None, "west": config}
        said = io.StringIO()
        call_command("kubernetes_rbac", "--service-account", "console", "--namespace", "shop", stdout=said)
        objects = list(yaml.safe_load_all(said.getvalue()))
        assert [each["kind"] for each in objects][:3] == ["ServiceAccount", "Role", "RoleBinding"]
        binding = next(each for each in objects if each["kind"] == "RoleBinding")
        assert binding["metadata"]["namespace"] == "runs"
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "console", "namespace": "shop"}]
        assert not any("*" in rule["verbs"] for each in objects for rule in each.get("rules", ()))

    @pytest.mark.parametrize("name", ["here", "south"])
    def test_without_such_a_cluster_it_says_so(self, settings, name):
        settings.TRAINYARD_CLUSTERS = {"here": None}
        with pytest.raises(CommandError, match=r"names no such cluster of Kubernetes\. There is none"):
            call_command("kubernetes_rbac", name)
