"""The pages of a job's files."""

import pytest
from django.urls import reverse

from jobs import results
from runtime.specs import Outcome

PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)
HTMX = {"HX-Request": "true"}


@pytest.fixture
def job(customer):
    """A job with outputs, among them a page that a browser must not run."""
    attempt = customer.started()
    folder = customer.backend.output_folder(results.checkpoint_key(attempt.job_id))
    (folder / "samples").mkdir(parents=True)
    (folder / "page.html").write_text("<script>alert(1)</script>")
    (folder / "drawing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>")
    (folder / "curve.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(customer.folder / "train.py")
    (folder / "loss.csv").write_text("epoch,loss\n1,<b>\n")
    return attempt.job


def get(client, name, *arguments, **options):
    answer = client.get(reverse(name, args=arguments), **options)
    assert answer.status_code == 200, answer.status_code
    return answer.text


def test_folders_and_files_of_a_job_are_shown_in_pages(customer, owner_page, job, monkeypatch):
    assert f'hx-get="{reverse("job_files", args=[job.pk])}"' in get(owner_page, "job_detail", job.pk)
    top = get(owner_page, "job_files", job.pk, headers=HTMX)
    assert "<html" not in top
    assert [name in top for name in (">outputs<", ">checkpoints<", ">logs<")] == [True] * 3
    assert "Kept for 30 days after the job ends" in top
    folder = get(owner_page, "job_folder", job.pk, "outputs")
    assert "<html" in folder
    assert reverse("api_job_file", args=[job.pk, "outputs/loss.csv"]) in folder
    assert f'{reverse("api_job_archive", args=[job.pk])}?path=outputs/samples"' in folder
    assert "link.png" not in folder
    moved = owner_page.get(reverse("job_folder", args=[job.pk, "outputs/loss.csv"]))
    assert moved["Location"] == reverse("job_file", args=[job.pk, "outputs/loss.csv"])
    table = get(owner_page, "job_file", job.pk, "outputs/loss.csv")
    assert '<th scope="col">loss</th>' in table
    assert "<td>&lt;b&gt;</td>" in table
    monkeypatch.setattr("console.web.job_files.PAGE_ROWS", 4)  # of five rows: folders are first, links are left out
    first = owner_page.get(reverse("job_folder", args=[job.pk, "outputs"]))
    assert [name in first.text for name in ("loss.csv", "page.html")] == [True, False]
    assert ">page.html<" in owner_page.get(first.context["next_url"]).text
    customer.end(job.attempts.get(), Outcome.COMPLETED)
    assert "Kept until" in get(owner_page, "job_files", job.pk)


def test_html_and_svg_are_shown_as_text_and_are_no_pictures(owner_page, job):
    pk = job.pk
    for name in ("page.html", "drawing.svg"):
        shown = get(owner_page, "job_file", pk, f"outputs/{name}")
        assert "alert(1)" in shown
        assert "<script>alert" not in shown
        assert "<svg xmlns=" not in shown
        assert owner_page.get(reverse("job_image", args=[pk, f"outputs/{name}"])).status_code == 404
    assert reverse("job_image", args=[pk, "outputs/curve.png"]) in get(owner_page, "job_file", pk, "outputs/curve.png")
    picture = owner_page.get(reverse("job_image", args=[pk, "outputs/curve.png"]))
    assert b"".join(picture.streaming_content) == PNG
    assert picture["Content-Type"] == "image/png"
    file = owner_page.get(reverse("api_job_file", args=[pk, "outputs/page.html"]))
    assert b"".join(file.streaming_content).startswith(b"<script>")
    assert file["Content-Type"] == "application/octet-stream"
    assert file["Content-Disposition"].startswith("attachment")
    for answer in (picture, file):
        assert answer["X-Content-Type-Options"] == "nosniff"
        assert answer["Content-Security-Policy"] == "default-src 'none'; sandbox"


def test_a_path_that_cannot_be_shown_says_why(owner_page, job):
    for name, path, sentence in (
        ("job_folder", "outputs/../..", "leaves its folder"),
        ("job_folder", "outputs/none", "no file at this path"),
        ("job_file", "outputs/link.png", "leaves its folder"),
        ("job_file", "outputs/samples", "folder at this path"),
        ("job_file", "secret", "no file at this path"),
    ):
        assert sentence in get(owner_page, name, job.pk, path), path
