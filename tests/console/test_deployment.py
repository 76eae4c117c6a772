"""`check_deployment`, `prepare` and `serve`: what a deployment is refused for; containers run what `up` runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from console import deployment, supervision
from console.management.commands import serve
from runtime.backends.kubernetes_config import ClusterConfig

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = {"in_cluster": True, "volume": {"claim": "data", "root": "/srv/trainyard"}}


@pytest.fixture
def deployed(settings, tmp_path):
    """Settings that are fit for customers."""
    settings.VAR_DIR = tmp_path
    settings.SECRET_KEY = "k" * 64
    settings.DEBUG = False
    settings.EMBEDDED_DATABASE = settings.EMBEDDED_REDIS = False
    settings.HTTPS = True
    settings.TRAINYARD_URL = "https://trainyard.example.com"
    settings.PAYMENTS_SANDBOX = False
    settings.STRIPE_SECRET_KEY, settings.STRIPE_WEBHOOK_SECRETS = "sk_live_1", ["whsec_1"]
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.DEFAULT_FROM_EMAIL = "Trainyard <noreply@trainyard.example.com>"
    cluster = {"in_cluster": True, "volume": {"claim": "data", "root": str(tmp_path)}}
    settings.TRAINYARD_CLUSTERS = {"default": ClusterConfig.from_data("default", cluster)}
    return settings


def found():
    return {finding.setting for finding in deployment.findings()}


def test_a_deployment_that_is_ready_is_told_so(deployed, capsys):
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
        ("HTTPS", False, "TRAINYARD_URL"),
        ("TRAINYARD_URL", "https://CHANGE-ME.example.com", "TRAINYARD_URL"),
        ("PAYMENTS_SANDBOX", True, "STRIPE_SECRET_KEY"),
        ("STRIPE_WEBHOOK_SECRETS", [], "STRIPE_WEBHOOK_SECRETS"),
        ("EMAIL_BACKEND", "django.core.mail.backends.console.EmailBackend", "EMAIL_URL"),
        ("DEFAULT_FROM_EMAIL", "Trainyard <noreply@localhost>", "DEFAULT_FROM_EMAIL"),
        ("TRAINYARD_CLUSTERS", {"default": None}, "TRAINYARD_CLUSTERS"),
    ],
)
def test_each_setting_that_is_not_is_named_with_its_remedy(deployed, capsys, setting, value, named):
    setattr(deployed, setting, value)
    assert found() == {named}
    with pytest.raises(CommandError, match=r"1 settings are not ready"):
        call_command("check_deployment")
    assert capsys.readouterr().out.startswith(f"{named}: ")


def test_a_database_that_is_still_the_examples_is_noticed(deployed, monkeypatch):
    monkeypatch.setitem(deployed.DATABASES["default"], "PASSWORD", "CHANGE-ME")
    assert found() == {"DATABASE_URL"}


def test_a_key_made_on_the_spot_is_nobody_elses(deployed):
    (deployed.VAR_DIR / "secret_key").write_text(deployed.SECRET_KEY)
    assert found() == {"SECRET_KEY"}


def test_what_the_examples_leave_open_is_noticed(deployed):
    config = CLUSTER | {"images": {"pytorch": "CHANGE-ME.example.com/pytorch:1"}}
    deployed.TRAINYARD_CLUSTERS = {"default": ClusterConfig.from_data("default", config)}
    assert found() == {"TRAINYARD_CLUSTERS"}


class TestPrepare:
    @pytest.mark.django_db(transaction=True)
    def test_it_may_run_any_number_of_times(self, deployed):
        call_command("prepare", verbosity=0)
        call_command("prepare", verbosity=0)

    def test_it_refuses_before_it_touches_anything(self, deployed, capsys):
        deployed.EMBEDDED_DATABASE = True
        with pytest.raises(CommandError, match="not ready"):
            call_command("prepare", "--trial")
        assert "DATABASE_URL" in capsys.readouterr().err

    @pytest.mark.django_db(transaction=True)
    def test_a_trial_may_have_play_money_and_no_mail(self, deployed):
        deployed.PAYMENTS_SANDBOX, deployed.HTTPS = True, False
        deployed.EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
        call_command("prepare", "--trial", verbosity=0)
        with pytest.raises(CommandError, match="3 settings"):
            call_command("prepare", verbosity=0)


def test_serve_becomes_the_very_program_that_up_runs(monkeypatch, settings, tmp_path):
    settings.VAR_DIR = tmp_path / "var"
    became = []
    monkeypatch.setattr(serve.os, "execv", lambda *words: became.append(words))
    monkeypatch.chdir(tmp_path)
    for program in supervision.programs():
        call_command("serve", program.name)
        assert became.pop() == (sys.executable, [sys.executable, *program.arguments])
        assert Path.cwd() == settings.BASE_DIR
    assert settings.VAR_DIR.is_dir()


def test_serve_knows_no_other_program(tmp_path):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRAINYARD_")}
    told = clean | {"TRAINYARD_VAR": str(tmp_path), "TRAINYARD_CLUSTERS": json.dumps({"default": {"backend": "local"}})}
    done = subprocess.run(
        [sys.executable, "manage.py", "serve", "shell"], cwd=ROOT, env=told, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "invalid choice: 'shell'" in done.stderr
