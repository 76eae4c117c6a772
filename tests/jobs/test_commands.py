"""The management commands of jobs. `.ci/run` runs all of `demo` (make demo ONCE=1); this module tests a part of it."""

import io
import json
import os
import signal
import stat
import subprocess

import pytest
import yaml
from django.core.management import CommandError, call_command

from jobs import watcher
from jobs.management.commands import check_cluster, demo
from runtime.backends.base import CheckResult
from runtime.backends.kubernetes.config import ClusterConfig


@pytest.fixture(autouse=True)
def _restored_signal_handlers():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_watch_runs_follows_until_sigterm(monkeypatch):
    stopped = []

    def follow_all(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        stopped.append(stop.wait(10))

    monkeypatch.setattr(watcher, "follow_all", follow_all)
    call_command("watch_runs")
    assert stopped == [True]


def test_the_secrets_of_the_demo_are_written_for_their_owner_alone(tmp_path):
    path = tmp_path / "demo.json"
    path.touch(mode=0o644)
    demo._write_private(path, {"a": 1})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("step", "sentence"),
    [("_accounts", "before it bought a run"), ("_buy_and_show", "A run that was bought continues")],
)
def test_an_interrupted_demo_fails_and_says_what_goes_on(monkeypatch, settings, tmp_path, step, sentence):
    started, popen, answers = [], subprocess.Popen, iter([False, True])

    def start(_command, **options):
        started.append(popen(["sleep", "60"], **options))
        return started[0]

    def interrupt(*_arguments):
        raise KeyboardInterrupt  # a signal would be ignored where the shell started the tests in the background

    settings.VAR_DIR = tmp_path
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(demo, "_is_ready", lambda: next(answers))
    monkeypatch.setattr(demo, "_accounts", lambda: {"customer": {"token": "t"}})
    monkeypatch.setattr(demo, step, interrupt)
    with pytest.raises(CommandError, match=sentence) as error:
        call_command("demo", "--once")
    assert error.value.returncode == demo.INTERRUPTED
    assert [server.returncode for server in started] == [-signal.SIGTERM]  # nothing of the console is left


def run_command(*arguments):
    """Run a command; return what it printed, and the error it ended with."""
    output = io.StringIO()
    try:
        call_command(*arguments, stdout=output)
    except CommandError as error:
        return output.getvalue(), str(error)
    return output.getvalue(), ""


@pytest.fixture
def west(settings):
    """The configuration of a cluster of Kubernetes, which the settings name beside a local one."""
    config = ClusterConfig.from_data("west", {"volume": {"claim": "runs", "root": "/srv"}, "namespace": "runs"})
    settings.TRAINYARD_CLUSTERS = {"here": None, "west": config}
    return config


def test_check_cluster_prints_each_check_with_its_remedy_and_fails_if_one_fails(monkeypatch):
    options = []

    def check(_cluster, **given):
        options.append(given)
        yield CheckResult("sandbox", ok=True, detail="there")
        yield CheckResult("images", ok=False, detail="None.", remedy="Build one")

    monkeypatch.setattr(check_cluster.local_check, "check", check)
    text, error = run_command("check_cluster", "default", "--no-smoke")
    assert "1 of the checks" in error
    assert all(words in text for words in ("The cluster default", "✓", "sandbox", "✗", "Build one"))
    assert options[0]["smoke"] is False
    assert "names no cluster 'south'. There are: default" in run_command("check_cluster", "south")[1]


def test_check_cluster_has_checks_of_its_own_for_kubernetes(monkeypatch, settings, west):
    calls = []

    def check(*given, **options):
        calls.append((*given, options))
        yield CheckResult("API server", ok=True, detail="1.36")

    monkeypatch.setattr(check_cluster.kubernetes_backend, "check", check)
    assert "1.36" in run_command("check_cluster", "west")[0]
    assert calls == [(west, settings.TRAINYARD_RUNS_ROOT / ".clusters" / "west", {"smoke": True})]


@pytest.mark.usefixtures("west")
def test_kubernetes_rbac_prints_roles_that_can_be_applied():
    text, error = run_command("kubernetes_rbac", "--service-account", "console", "--namespace", "shop")
    objects = list(yaml.safe_load_all(text))
    assert (error, [each["kind"] for each in objects][:3]) == ("", ["ServiceAccount", "Role", "RoleBinding"])
    binding = next(each for each in objects if each["kind"] == "RoleBinding")
    assert binding["metadata"]["namespace"] == "runs"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "console", "namespace": "shop"}]
    assert not any("*" in rule["verbs"] for each in objects for rule in each.get("rules", ()))
    for name in ("here", "south"):
        assert "names no such cluster of Kubernetes" in run_command("kubernetes_rbac", name)[1]
