"""Settings of clusters and deployments: `check_deployment`, `prepare` and `serve`."""

import json
import sys
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError

from console import deployment
from console.clusters import parse
from console.management.commands import serve
from console.supervision import supervisor
from runtime.backends.kubernetes.config import ClusterConfig

WEST = {"backend": "kubernetes", "volume": {"claim": "runs", "root": "/srv/trainyard"}}
UNFINISHED = WEST | {"images": {"pytorch": "CHANGE-ME.example.com/pytorch:1"}}


def test_clusters_keep_their_order_and_names_and_the_default_is_this_machine():
    assert parse("") == parse("  \n") == {"default": None}
    with pytest.raises(ImproperlyConfigured, match="RUNTIME_BACKEND is 'kubernetes', but without TRAINYARD_CLUSTERS"):
        parse("", backend="kubernetes")
    hpc = {"backend": "slurm", "account": "trainyard"}
    clusters = parse(json.dumps({"west": WEST, "here": {"backend": "local"}, "hpc": hpc}))
    assert list(clusters) == ["west", "here", "hpc"]
    assert clusters["hpc"].organization_account("acme") == "trainyard"
    assert clusters["west"].volume.claim == "runs"
    assert clusters["here"] is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "TRAINYARD_CLUSTERS is not valid JSON: Expecting property name"),
        ("[]", "must be a JSON object that names a cluster"),
        ("{}", "must be a JSON object that names a cluster"),
        ('{"a": {"backend": "local"}, "b": {"backend": "local"}}', "only one cluster can be local"),
        ('{"a": {"backend": "local", "cpus": 3}}', "the local cluster 'a' has the unknown key 'cpus'.* LOCAL_CPUS"),
        (
            '{"a": {"backend": "docker"}}',
            "'a' has the unknown backend 'docker'. Choose kubernetes, local or slurm",
        ),
        ('{"a": {"backend": []}}', r"'a' has the unknown backend '\[\]'"),
        ('{"a": {"backend": "slurm", "partition": "gpu"}}', "'a': 'partition' is not a setting"),
        ('{"a": 3}', "'a' must be a JSON object"),
        ('{"a": {}}', "'volume' must be"),
        (json.dumps({"a": WEST | {"namespace": "No Good"}}), "'namespace' is 'No Good'"),
        (json.dumps({"a": WEST | {"gang_second": 3}}), "'gang_second' is not a setting"),
        (json.dumps({"A_b": WEST}), "'A_b' cannot name a cluster"),
        (json.dumps({"a" * 33: WEST}), "longer than 32"),
    ],
)
def test_an_invalid_cluster_is_explained_in_one_sentence(text, sentence):
    with pytest.raises(ImproperlyConfigured, match=sentence):
        parse(text)


@pytest.fixture
def deployed(settings, tmp_path):
    """Settings that are ready for customers."""
    settings.VAR_DIR = tmp_path
    settings.SECRET_KEY = "k" * 64
    settings.DEBUG = False
    settings.EMBEDDED_DATABASE = settings.EMBEDDED_REDIS = False
    settings.HTTPS = True
    settings.TRAINYARD_URL = "https://trainyard.example.com"
    settings.PAYMENTS_SANDBOX = False
    settings.STRIPE_SECRET_KEY, settings.STRIPE_WEBHOOK_SECRETS = "sk_live_1", ["whsec_1"]
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.ACCOUNT_EMAIL_VERIFICATION = "mandatory"
    settings.DEFAULT_FROM_EMAIL = "Trainyard <noreply@trainyard.example.com>"
    settings.TRAINYARD_CLUSTERS = {
        "default": ClusterConfig.from_data(
            "default", {"in_cluster": True, "volume": {"claim": "data", "root": str(tmp_path)}}
        )
    }
    return settings


def unready_settings():
    return {finding.setting for finding in deployment.findings()}


def test_ready_settings_are_confirmed(deployed, capsys):
    call_command("check_deployment")
    assert capsys.readouterr().out == "The settings are ready for a deployment.\n"


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("SECRET_KEY", "short", "SECRET_KEY"),
        ("SECRET_KEY", "CHANGE-ME" * 10, "SECRET_KEY"),
        ("DEBUG", True, "DEBUG"),
        ("EMBEDDED_DATABASE", True, "DATABASE_URL"),
        ("EMBEDDED_REDIS", True, "REDIS_URL"),
        ("REDIS_URL", "redis://:CHANGE-ME@host/0", "REDIS_URL"),
        ("UPLOAD_BUCKET", "bucket", "UPLOAD_BUCKET_ENDPOINT"),
        ("HTTPS", False, "TRAINYARD_URL"),
        ("TRAINYARD_URL", "https://CHANGE-ME.example.com", "TRAINYARD_URL"),
        ("PAYMENTS_SANDBOX", True, "STRIPE_SECRET_KEY"),
        ("STRIPE_WEBHOOK_SECRETS", [], "STRIPE_WEBHOOK_SECRETS"),
        ("EMAIL_BACKEND", "django.core.mail.backends.console.EmailBackend", "EMAIL_URL"),
        ("EMAIL_HOST", "CHANGE-ME.example.com", "EMAIL_URL"),
        ("ACCOUNT_EMAIL_VERIFICATION", "optional", "EMAIL_VERIFICATION"),
        ("DEFAULT_FROM_EMAIL", "Trainyard <noreply@localhost>", "DEFAULT_FROM_EMAIL"),
        ("TRAINYARD_CLUSTERS", {"default": None}, "TRAINYARD_CLUSTERS"),
        ("TRAINYARD_CLUSTERS", parse(json.dumps({"default": UNFINISHED | {"in_cluster": True}})), "TRAINYARD_CLUSTERS"),
    ],
)
def test_a_setting_that_is_not_ready_is_named_with_its_remedy(deployed, capsys, setting, value, named):
    setattr(deployed, setting, value)
    assert unready_settings() == {named}
    with pytest.raises(CommandError, match=r"1 settings are not ready"):
        call_command("check_deployment")
    assert capsys.readouterr().out.startswith(f"{named}: ")


def test_the_examples_password_and_a_generated_key_are_not_ready_and_prepare_refuses_them(
    deployed, monkeypatch, capsys
):
    monkeypatch.setitem(deployed.DATABASES["default"], "PASSWORD", "CHANGE-ME")
    (deployed.VAR_DIR / "secret_key").write_text(deployed.SECRET_KEY)  # where the settings put a key they generate
    assert unready_settings() == {"DATABASE_URL", "SECRET_KEY"}
    with pytest.raises(CommandError, match="not ready"):
        call_command("prepare", "--trial")  # refused before it needs the database, which this test lacks
    assert "DATABASE_URL" in capsys.readouterr().err


@pytest.mark.django_db(transaction=True)
def test_prepare_may_be_repeated_and_a_trial_needs_neither_payments_nor_email(deployed):
    call_command("prepare", verbosity=0)
    deployed.PAYMENTS_SANDBOX, deployed.HTTPS = True, False
    deployed.EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
    call_command("prepare", "--trial", verbosity=0)
    with pytest.raises(CommandError, match="3 settings"):  # those of payments, HTTPS and email above
        call_command("prepare", verbosity=0)


@pytest.mark.parametrize("command", ["prepare", "up"])
def test_nothing_is_prepared_with_a_currency_that_cannot_be_charged(deployed, command):
    deployed.CURRENCY = "Money"
    with pytest.raises(SystemCheckError, match="CURRENCY is 'Money'"):
        call_command(command, skip_checks=False)


def test_serve_executes_the_program_that_up_runs(monkeypatch, settings, tmp_path):
    settings.VAR_DIR = tmp_path / "var"
    executed = []
    monkeypatch.setattr(serve.os, "execv", lambda *command: executed.append(command))
    monkeypatch.chdir(tmp_path)
    for program in supervisor.programs():
        call_command("serve", program.name)
        assert executed.pop() == (sys.executable, [sys.executable, *program.arguments])
        assert Path.cwd() == settings.BASE_DIR
    assert settings.VAR_DIR.is_dir()
