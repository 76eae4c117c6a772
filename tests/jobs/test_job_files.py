"""The files of a job, which its code wrote: any name, any kind, and links that lead elsewhere."""

import io
import os
import tarfile

import pytest

from jobs import job_files, results
from jobs.models import Attempt
from runtime.specs import Outcome
from storage.errors import FileMissing, UnsafePath


def test_a_path_leads_to_the_folder_of_the_job(customer):
    attempt = customer.started()
    job, backend = attempt.job, customer.backend
    key, run = results.checkpoint_key(job.pk), backend.run_folder(attempt.run_name)
    for path, expected in (
        ("outputs/deep/model.pt", (backend.output_folder(key), "deep/model.pt")),
        ("checkpoints//./epoch-1", (backend.checkpoint_folder(key), "epoch-1")),
        ("logs/attempt-1/rank-12.log", (run, "logs/rank-12.log")),
    ):
        assert job_files.resolve(job, path) == expected
    for path in (
        "", "run/secret", "logs/attempt-2", "logs/attempt-01", "logs/attempt-1/supervisor-0.log",
        "logs/attempt-1/deep/rank-0.log", "logs/attempt-1/rank-0.log\n", "logs/attempt-" + "9" * 30,
    ):  # fmt: skip
        with pytest.raises(FileMissing):
            job_files.resolve(job, path)
    for path in ("outputs/../../secret", "/outputs", "outputs/\0", "../outputs", "logs/attempt-1/../.."):
        with pytest.raises(UnsafePath):
            job_files.resolve(job, path)
    Attempt.objects.update(backend="gone")  # a cluster that the settings no longer name
    for path in ("outputs", "checkpoints", "logs/attempt-1"):
        with pytest.raises(results.ClusterUnavailable):
            job_files.resolve(job, path)


@pytest.fixture
def job(customer):
    """A job whose code wrote ordinary files, and also links and a pipe that could mislead the console."""
    attempt = customer.started()
    backend, key = customer.backend, results.checkpoint_key(attempt.job_id)
    outputs, run = backend.output_folder(key), backend.run_folder(attempt.run_name)
    (outputs / "deep").mkdir(parents=True)
    (outputs / "deep" / "model.pt").write_bytes(b"weights")
    (outputs / "report <b>.html").write_text("<script>alert(1)</script>")
    (outputs / "link").symlink_to("/etc/passwd")
    (outputs / "away").symlink_to("/etc")
    os.mkfifo(outputs / "pipe")
    (run / "logs").mkdir(parents=True)
    for name in ("rank-0.log", "stacks-0.txt", "node-0.log", "supervisor-0.log"):
        (run / "logs" / name).write_text(name)
    (run / "logs" / "rank-1.log").symlink_to("/etc/passwd")
    return attempt.job


def entries(answer):
    assert answer.status_code == 200, answer.content
    return [(each["path"], each["kind"], each["size"]) for each in answer.json()["results"]]


def test_the_api_lists_and_serves_the_files_of_a_job(api, customer, job):
    client, address = api(customer.membership), f"/api/v1/jobs/{job.pk}/"
    top_folders = client.get(f"{address}files/").json()
    assert [(each["path"], each["modified_at"] is None) for each in top_folders["results"]] == [
        ("outputs", False), ("checkpoints", True), ("logs", False),  # the job wrote no checkpoint
    ]  # fmt: skip
    listed = client.get(f"{address}files/", {"path": "outputs"})
    assert entries(listed) == [("outputs/deep", "folder", 0), ("outputs/report <b>.html", "file", 25)]
    assert listed.json()["next"] is None
    assert entries(client.get(f"{address}files/", {"path": "checkpoints"})) == []
    assert entries(client.get(f"{address}files/", {"path": "logs"})) == [("logs/attempt-1", "folder", 0)]
    logs = entries(client.get(f"{address}files/", {"path": "logs/attempt-1"}))
    assert [path for path, _kind, _size in logs] == ["logs/attempt-1/rank-0.log", "logs/attempt-1/stacks-0.txt"]
    first = client.get(f"{address}files/", {"path": "outputs", "limit": 1})
    assert entries(first) == [("outputs/deep", "folder", 0)]
    assert entries(client.get(first.json()["next"])) == [("outputs/report <b>.html", "file", 25)]

    model = client.get(f"{address}files/outputs/deep/model.pt")
    assert (b"".join(model.streaming_content), model["Content-Type"]) == (b"weights", "application/octet-stream")
    part = client.get(f"{address}files/outputs/deep/model.pt", headers={"Range": "bytes=-4"})
    assert (part.status_code, b"".join(part.streaming_content)) == (206, b"ghts")
    log = client.get(f"{address}files/logs/attempt-1/rank-0.log")
    assert b"".join(log.streaming_content) == b"rank-0.log"

    # 404: there is no such file, or it is not shown. 400: it is no regular file, or its path leads elsewhere.
    for path, status in (
        ("outputs/none", 404), ("secret", 404), ("outputs/link", 400), ("outputs/away/passwd", 400),
        ("outputs/pipe", 400), ("outputs", 400), ("logs", 400), ("logs/attempt-1", 400),
        ("logs/attempt-1/rank-1.log", 400), ("logs/attempt-1/node-0.log", 404), ("outputs/%2e%2e/job-2", 400),
        ("outputs/a%00b", 400),
    ):  # fmt: skip
        assert client.get(f"{address}files/{path}").status_code == status, path
    for query, status in (
        ({"path": "outputs/none"}, 404), ({"path": "outputs/../.."}, 400), ({"path": "outputs/away"}, 400),
        ({"path": "outputs/deep/model.pt"}, 400), ({"limit": 0}, 400), ({"limit": 1001}, 400),
        ({"path": "outputs", "after": "é"}, 400),  # not a cursor that the API gave
    ):  # fmt: skip
        assert client.get(f"{address}files/", query).status_code == status, query
    for path, status in (
        ("outputs/none", 404), ("checkpoints", 404), ("outputs/..", 400), ("outputs/away", 400), ("outputs/pipe", 400),
    ):  # fmt: skip
        assert client.get(f"{address}archive/", {"path": path}).status_code == status, path


def test_a_folder_is_downloaded_as_an_archive(api, customer, job):
    client = api(customer.membership)
    outputs = {"outputs", "outputs/deep", "outputs/deep/model.pt", "outputs/report <b>.html"}
    logs = {"logs/attempt-1", "logs/attempt-1/rank-0.log", "logs/attempt-1/stacks-0.txt"}
    for path, expected in (
        ("outputs", outputs), ("outputs/deep", {"deep", "deep/model.pt"}), ("outputs/deep/model.pt", {"model.pt"}),
        ("logs", logs), ("", outputs | logs),
    ):  # fmt: skip
        answer = client.get(f"/api/v1/jobs/{job.pk}/archive/", {"path": path})
        assert answer["Content-Type"] == "application/gzip"
        name = f"job-{job.pk}-{path.rpartition('/')[2]}".rstrip("-")
        assert answer["Content-Disposition"] == f'attachment; filename="{name}.tar.gz"'
        with tarfile.open(fileobj=io.BytesIO(b"".join(answer.streaming_content))) as tar:
            assert {member.name for member in tar} == expected, path
    customer.end(job.attempts.get(), Outcome.COMPLETED)
    job.refresh_from_db()
    results.remove(job=job, user=None)
    assert entries(client.get(f"/api/v1/jobs/{job.pk}/files/", {"path": "outputs"})) == []
    assert client.get(f"/api/v1/jobs/{job.pk}/files/outputs/deep/model.pt").status_code == 404
