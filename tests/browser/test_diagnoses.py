"""For each family of causes, the page of a failed job says what happened, where and who pays, and links to the fix.

A family here has a button or a page of its own; `tests/jobs/test_diagnosis.py` has every cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import unescape

from playwright.sync_api import expect

from billing.models import NodeSpec
from jobs import dispatch, results
from jobs.models import Attempt
from runtime.specs import Outcome
from tests.browser.conftest import LIVE_SERVER_MARKS, english_texts, in_chinese, untranslated
from tests.browser.test_accessibility import texts_of
from tests.factories.jobs import SCRIPT
from tests.factories.storage import DatasetFactory, DatasetVersionFactory

pytestmark = LIVE_SERVER_MARKS
LINE = 3
CODE = "# first\n# second\nmain()\n"
"""The script of every job. Its line LINE is in the traceback."""
TRACEBACK = f'Traceback (most recent call last):\n  File "/workspace/{SCRIPT}", line {LINE}, in <module>\n    main()\n'
RERUN = "Change the order and run again"


@dataclass(frozen=True)
class Case:
    """How a run of a family ends: what the failing rank printed, what its page says, and where the button leads.

    `printed` is an exception, with a traceback before it, unless `is_raised` is false. `fields` are values of the order
    form behind the button; without them the button opens `file` in the editor, or the job's files if that is empty.
    """

    family: str
    title: str
    button: str
    printed: str = ""
    fields: dict[str, str] | None = None
    file: str = SCRIPT
    outcome: Outcome = Outcome.CODE_FAILED
    signal: str = ""
    is_billed: bool = True
    is_raised: bool = True


CASES = [
    Case("memory of the node", "The node ran out of memory.", "Run again on Small, $1.60 per node-hour",
         outcome=Outcome.OUT_OF_MEMORY, fields={"node_spec": "small"}, is_raised=False),
    Case("memory of the GPU", "The GPU ran out of memory.", "Run again with batch size 16",
         "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", {"batch_size": "16"}),
    Case("no GPU", "The code uses CUDA, but the node has no GPU that it can use.",
         "Run again on H100, $3.00 per node-hour",
         "RuntimeError: Found no NVIDIA driver on your system.", {"node_spec": "gpu"}),
    Case("disk", "The run wrote more than its disk holds.", "Look at the files",
         outcome=Outcome.DISK_FULL, file="", is_raised=False),
    Case("time limit", "The run reached its time limit before it was done.", "Continue with a higher time limit",
         outcome=Outcome.TIME_LIMIT, fields={"from_checkpoint": "{job}"}, is_raised=False),
    Case("platform", "The platform could not complete this run.", "Run again",
         outcome=Outcome.NODE_LOST, fields={}, is_billed=False, is_raised=False),
    Case("hang", "The run hung: no rank made progress any more.", RERUN,
         outcome=Outcome.HUNG, fields={}, is_billed=False, is_raised=False),  # it never made progress
    Case("argument of the local rank", "The script does not accept the argument --local-rank.", RERUN,
         "train.py: error: unrecognized arguments: --local-rank=0", {}, is_raised=False),
    Case("module", "The module einops is not installed.", "Open requirements.txt",
         "ModuleNotFoundError: No module named 'einops'", file="requirements.txt"),
    Case("syntax and names", "The name nett is not defined.", "Open train.py",
         "NameError: name 'nett' is not defined"),
    Case("file", "/datasets/digits/trian.csv", "Open train.py",
         "FileNotFoundError: [Errno 2] No such file or directory: '/datasets/digits/trian.csv'"),
    Case("killed", "The process was killed (SIGKILL).", RERUN, fields={}, signal="SIGKILL", is_raised=False),
    Case("exit", "The code ended itself with exit code 1.", RERUN, "no data", {}, is_raised=False),
]  # fmt: skip


def fail(customer, case):
    """Buy a run that fails as the case says. Return its job's number."""
    attempt = customer.started(datasets="digits")
    customer.backend.write(attempt.run_name, f"{TRACEBACK if case.is_raised else ''}{case.printed}\n", rank=1)
    outputs = customer.backend.output_folder(results.checkpoint_key(attempt.job_id))
    outputs.mkdir(parents=True)
    (outputs / "part.pt").write_bytes(b"x")
    ended_early = case.outcome in {Outcome.NODE_LOST, Outcome.TIME_LIMIT}
    job = customer.end(attempt, case.outcome, rank=None if ended_early else 1)
    while not job.is_ended:  # a platform fault is retried for free, a few times
        dispatch.dispatch_queue()
        attempt = job.attempts.last()
        customer.backend.start(attempt.run_name)
        job = customer.end(attempt, case.outcome)
    if case.signal:  # the fake cluster's ranks end with an exit code, so the signal is written into the row
        failure = job.attempts.get().failure | {"signal": case.signal, "exit_code": None}
        Attempt.objects.filter(job=job).update(failure=failure)
    results.count_storage(job.pk)
    return job.pk


@in_chinese
def test_each_family_of_causes_is_explained_and_its_button_leads_to_the_fix(url, customer, client, strict_window):
    page = strict_window.page
    client.force_login(customer.membership.user)
    customer.write(SCRIPT, CODE)
    DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"))
    # The only node spec with a GPU, to which a button leads
    NodeSpec.objects.filter(name="medium").update(name="gpu", title="H100", gpus=1)
    followed = set()
    for job, case in [(fail(customer, case), case) for case in CASES]:
        _check_explanation(client.get(f"/jobs/{job}/").content.decode(), case)
        chinese = client.get(f"/jobs/{job}/", headers={"accept-language": strict_window.language}).content.decode()
        assert not list(filter(english_texts().fullmatch, texts_of(chinese))), case.family
        if case.button not in followed:  # families share buttons
            page.goto(f"{url}/jobs/{job}/")
            assert untranslated(page) == [], case.family
            page.locator("#fix").click()
            _check_fix(page, job, case)
            followed.add(case.button)


def _check_explanation(html, case):
    section = html[html.index('id="diagnosis"') : html.index("</section>", html.index('id="diagnosis"'))]
    text = " ".join(unescape(re.sub(r"<[^>]*>", "", section)).split())
    payer = "you pay for the time used" if case.is_billed else "this run is free"
    for part in (case.title, payer, case.button, *((case.printed, "main()") if case.is_raised else ())):
        assert part in text, case.family
    assert (f"/workspace/{SCRIPT}, line {LINE}" in text) is case.is_raised, case.family
    assert ("diagnosis-source" in section) is case.is_raised, case.family


def _check_fix(page, job, case):
    if case.fields is not None:
        page.wait_for_url(re.compile(rf"/training/new/\?rerun={job}\b"))
        expect(page.locator("#code_path"), case.family).to_have_value(SCRIPT)
        for name, value in case.fields.items():
            field = page.locator(f"input[type=radio][name={name}]:checked, :not([type=radio])[name={name}]")
            expect(field, case.family).to_have_value(value.format(job=job))
    elif case.file:
        page.wait_for_url(re.compile(rf"/workspaces/w/main/file/{re.escape(case.file)}\b"))
        expect(page.locator(".CodeMirror"), case.family).to_be_visible()
        if case.file == SCRIPT:  # the editor opens at the traceback's line
            expect(page.locator(".CodeMirror-activeline"), case.family).to_contain_text("main()")
    else:
        page.wait_for_url(f"**/jobs/{job}/files/")
        expect(page.get_by_role("link", name="outputs", exact=True), case.family).to_be_visible()
