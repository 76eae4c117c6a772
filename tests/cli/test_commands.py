"""The commands against Django: what they change, and what they print for programs and for people."""

import json
import os
from datetime import datetime

import pytest

from cli.watch import Watch
from jobs import clusters, results
from jobs.models import Job
from runtime.specs import Outcome
from storage.models import DatasetVersion, Workspace
from storage.selectors import workspace_folder
from tests.cli.conftest import URL
from tests.factories.jobs import start
from tests.factories.storage import ModelVersionFactory

pytestmark = pytest.mark.django_db
RUN = ("run", "train.py", "--node-spec", "nano", "--nodes", 2, "--max-minutes", 60, "--detach")
"""A command that buys a run. It lacks `--yes`, so it asks first. `--detach` is last: one test leaves it out."""


def folder_of(name):
    return workspace_folder(Workspace.objects.get(name=name))


@pytest.mark.usefixtures("project")
def test_run_syncs_the_folder_and_orders_a_job(shell):
    done = shell.json(*RUN, "--yes", "--env", "A=1=2", "--tag", "x", "--", "--depth", "3")
    job = Job.objects.get()
    assert (job.pk, job.arguments, job.nodes, job.tags) == (done["job"]["id"], ["--depth", "3"], 2, ["x"])
    assert (job.environment, job.workspace.name, job.image.name) == ({"A": "1=2"}, "mein-projekt", "pytorch")
    assert (folder_of("mein-projekt") / "data" / "a b#%?ä.txt").read_bytes() == b"a"
    assert "Ceiling" in shell(*RUN, "--yes")
    assert "0 files sent (0 bytes), 2 unchanged" in shell.stdout
    assert f"{URL}/jobs/{job.pk + 1}/" in shell.stdout


@pytest.mark.usefixtures("project")
def test_a_run_is_bought_only_with_consent_or_below_a_limit_and_never_with_errors(shell):
    for options, status, code, message in (
        # Options, exit status, and the error's code and part of its message.
        ((), 2, "invalid", "There is no terminal to ask on: add --yes or --max-price"),
        (("--max-price", "0.01"), 5, "too_expensive", "above your limit of 0.01 USD"),
        (("--max-price", "nan"), 2, "invalid", "--max-price must be an amount"),
        (("--yes", "--nodes", 1000), 1, "invalid", ""),
        (("--yes", "--ceiling", "1e-9"), 2, "invalid", "--ceiling must be an amount"),
        (("--yes", "--ceiling", "9e999999"), 2, "invalid", "--ceiling must be an amount"),
        (("--yes", "--env", "A"), 2, "invalid", "NAME=VALUE"),
        (("--yes", "--folder", "data"), 2, "invalid", "is not in the folder"),
    ):
        shell(*RUN, *options, "--json", status=status)
        error = json.loads(shell.stderr.splitlines()[-1])
        assert error["code"] == code
        assert message in error["message"]
        assert ("nodes" in error["fields"]) == (1000 in options)
        assert shell.stdout == ""
    assert not Job.objects.exists()
    shell.is_interactive = True
    for answer, count in (("n\n", 0), ("y\n", 1)):
        shell(*RUN, text=answer, status=1 - count)
        assert "Buy this run for at most" in shell.stdout
        assert Job.objects.count() == count
    shell.is_interactive = False
    assert "high estimate" in shell(*RUN, "--max-price", "1000")  # "90% of runs" is not claimed: nothing was measured
    assert Job.objects.count() == 2


def test_a_script_that_only_the_workspace_has_is_run_without_sync(shell, project):
    (project / "train.py").unlink()
    shell(*RUN, "--yes", status=2)
    done = shell.json(*RUN, "--yes", "--no-sync", "--workspace", "main")  # the customer's, which has train.py
    assert done["job"]["workspace"] == "main"


def test_sync_sends_differences_and_deletes_only_when_asked(shell, project):
    shell("workspace", "sync", "--workspace", "code")
    folder = folder_of("code")
    (folder / "old").mkdir()
    (folder / "old" / "a.txt").write_text("kept")
    (folder / "kept.log").write_text("ignored here")
    (folder / "results").mkdir()
    for name in ("kept.log", "old.txt"):
        (folder / "results" / name).write_text("of an earlier run")
    (folder / "parts").mkdir()
    (folder / "parts" / "old.py").touch()
    (project / "parts").mkdir()
    (project / "parts" / "new.py").touch()
    (folder / "train.py").write_text("print('HELLO')\n")  # of the same size: only the digest differs
    (project / ".trainyardignore").write_text("*.log\n")
    (project / "link").symlink_to("/etc/passwd")
    assert shell.json("workspace", "sync", "--workspace", "code") == {
        "workspace": "code", "sent": [".trainyardignore", "parts/new.py", "train.py"], "unchanged": 1, "deleted": [],
    }  # fmt: skip
    assert "Left out" in shell.stderr
    assert not (folder / "link").exists()
    shell("workspace", "sync", "--workspace", "code", "--delete", status=2)
    assert (folder / "old").exists()
    done = shell.json("workspace", "sync", "--workspace", "code", "--delete", "--yes")
    # Not "results", in which an ignored file stays.
    assert done["deleted"] == ["old", "parts/old.py", "results/old.txt"]
    assert not (folder / "old").exists()
    assert all((folder / kept).exists() for kept in ("kept.log", "results/kept.log", "parts/new.py"))
    assert (folder / "train.py").read_text() == "print('hello')\n"


@pytest.mark.usefixtures("project")
def test_a_sync_that_is_not_confirmed_creates_no_workspace(shell, monkeypatch):
    monkeypatch.setattr("cli.commands.workspaces.MANY_FILES", 1)  # the project has two
    shell.is_interactive = True
    assert "Send 2 files" in shell("workspace", "sync", "--workspace", "code", status=1, text="n\n")
    assert not Workspace.objects.filter(name="code").exists()
    shell("workspace", "sync", "--workspace", "code", text="y\n")
    assert Workspace.objects.filter(name="code").exists()


def test_a_dataset_is_published_from_a_folder_or_an_archive_and_a_model_downloaded(shell, project, customer):
    assert shell.json("datasets", "push", "digits", project / "data")["version"] == 1
    assert shell.json("datasets", "push", "digits", project / "train.py")["version"] == 2
    first, second = DatasetVersion.objects.order_by("number")
    assert (first.file_count, second.file_count) == (1, 1)
    assert "digits" in shell("datasets", "list")
    assert [each["latest"]["version"] for each in shell.json("datasets", "list")] == [2]
    shell("datasets", "push", "digits", project / "missing", status=2)
    ModelVersionFactory(model__organization=customer.organization, model__name="net", number=1)
    assert [each["name"] for each in shell.json("models", "list")] == ["net"]
    assert "net" in shell("models", "list")
    saved = shell.json("models", "get", "net", "--to", project)
    assert (project / "net-v1.tar.gz").stat().st_size == saved["size_bytes"]
    shell("models", "get", "net@1", status=2)  # the file exists already
    for version in ("", "x", "1.0", "-1"):
        shell("models", "get", f"net@{version}", "--to", project / "other", status=2)
        assert "as a number" in shell.stderr, version


def test_a_job_is_listed_followed_and_stopped_and_its_receipt_shown(shell, customer):
    attempt = customer.started(nodes=1)
    job = attempt.job
    assert [each["id"] for each in shell.json("jobs", "--state", "running")] == [job.pk]
    assert str(job.pk) in shell("jobs")
    assert shell.json("status", job.pk)["state"] == "running"
    assert "at most" in shell("status", job.pk)
    customer.backend.write(attempt.run_name, "one\ntwo")
    assert shell.json("logs", job.pk) == {"job": job.pk, "rank": 0, "text": "one\ntwo"}
    (time,) = set(shell.json("logs", job.pk, "--timestamps")["times"])
    assert abs(time - customer.backend.clock()) < 60
    printed = [line.split(" ") for line in shell("logs", job.pk, "--timestamps").splitlines()]
    assert [datetime.fromisoformat(at).timestamp() for at, _text in printed] == [pytest.approx(time, abs=0.001)] * 2
    assert [text for _at, text in printed] == shell("logs", job.pk).splitlines() == ["one", "two"]
    assert shell.json("metrics", job.pk) == {}
    shell("receipts", job.pk, status=1)
    assert "Error (not_found)" in shell.stderr
    assert shell.json("stop", job.pk)["state"] == "stopping"
    customer.end(attempt, Outcome.STOPPED)
    receipt = shell.json("receipts", job.pk)
    assert receipt["total_minor"] <= receipt["ceiling_minor"]
    assert [each["id"] for each in shell.json("receipts")] == [receipt["id"]]
    assert "Charged" in shell("receipts", job.pk)
    assert "Ceiling" in shell("receipts")


def test_files_of_a_job_are_listed_and_downloaded_once(shell, project, customer):
    job = customer.job(nodes=1)
    start(job)
    outputs = clusters.cluster().output_folder(results.checkpoint_key(job.pk))
    (outputs / "deep").mkdir(parents=True)
    (outputs / "model.bin").write_bytes(b"model")
    (outputs / "deep" / "a b#?%.txt").write_bytes(b"text")
    (outputs / "link").symlink_to("/etc/passwd")
    assert {each["path"] for each in shell.json("files", "list", job.pk)} == {"outputs", "checkpoints", "logs"}
    assert "outputs/deep/" in shell("files", "list", job.pk, "outputs")
    saved = shell.json("files", "get", job.pk)["files"]
    assert sorted(saved) == [f"trainyard-jobs/{job.pk}/outputs/{name}" for name in ("deep/a b#?%.txt", "model.bin")]
    assert (project / saved[0]).read_bytes() == b"model"
    assert "0 bytes received" in shell("files", "get", job.pk)
    (outputs / "model.bin").write_bytes(b"other")
    os.utime(outputs / "model.bin", (10**9, 10**9))  # of the same size, but with another time
    shell("files", "get", job.pk, "outputs/model.bin", status=2)  # it would overwrite the earlier download
    shell("files", "get", job.pk, "outputs/model.bin", "--overwrite")
    assert (project / saved[0]).read_bytes() == b"other"
    shell("files", "get", job.pk, "outputs/../logs", status=1)
    assert "not a safe path" in shell.stderr


@pytest.mark.usefixtures("project")
def test_at_ctrl_c_the_job_is_stopped_or_left_alone(shell, monkeypatch):
    def follow(watch):
        job = watch._client.job(watch._job_id)
        if not job.finished_at:
            raise KeyboardInterrupt
        return job

    monkeypatch.setattr(Watch, "follow", follow)
    # The answer to the question, if there is a terminal to ask on; "" is the end of the input.
    for answer, status, state in (
        ("detach\n", 130, "queued"), ("", 130, "queued"), ("stop\n", 4, "cancelled"), (None, 130, "queued"),
    ):  # fmt: skip
        shell.is_interactive = answer is not None
        shell(*RUN[:-1], "--yes", text=answer, status=status)
        assert Job.objects.latest("pk").state == state, answer
        assert ("goes on" in shell.stdout) == (state == "queued")
        assert ("Charged" in shell.stdout) == (state == "cancelled")


def test_login_stores_the_token_for_its_console_alone_and_logout_deletes_it(shell, home, customer):
    token = shell.environment.pop("TRAINYARD_TOKEN")
    shell.environment.pop("TRAINYARD_URL")
    shell("whoami", status=1)
    assert "trainyard login" in shell.stderr
    shell("login", URL, text="ty_wrong", status=1)
    assert not (home / "config").exists()
    assert shell.json("login", URL, text=f"{token}\n")["email"] == customer.membership.user.email
    assert token not in shell.stdout + shell.stderr
    stored = home / "config" / "trainyard" / "credentials.json"
    assert (stored.stat().st_mode & 0o777, stored.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert shell.json("whoami")["url"] == URL
    stored.chmod(0o644)
    shell("whoami", status=1)
    assert "chmod 600" in shell.stderr
    stored.chmod(0o600)
    shell("--url", "https://other.example.com", "whoami", status=1)
    assert shell.json("logout") == {"url": URL}
    shell("whoami", status=1)
