"""Forms of the console: errors are shown at their fields, valid input does what it says."""

import base64
import html
import json
import re

from django.conf import settings
from django.urls import reverse

from billing.models import Quote, TopUp
from console.accounts.models import Membership
from console.accounts.roles import Role
from console.web import training, workspaces
from jobs.models import Job, Order
from storage import files, selectors
from storage.models import Dataset, DeletedFile, Workspace
from tests.factories.accounts import MembershipFactory
from tests.factories.jobs import Customer
from tests.factories.storage import DatasetFactory, DatasetVersionFactory

TOUCHED = "product,framework,image,workspace,code_path,lr,epochs,nodes,ceiling_minor,max_seconds"
"""Fields that the customer has edited. Errors of other fields are not shown yet."""
ENDLESS = "9" * 5000
"""More digits than Python converts to an integer."""


def test_a_dataset_is_created_and_deleted(owner_page):
    create = lambda name: owner_page.post(reverse("dataset_new"), {"name": name})
    assert "lowercase letters" in create("Not A Name").text
    assert create("digits").status_code == 302
    assert "This name is taken" in create("digits").text
    assert owner_page.post(reverse("dataset_delete", args=["digits"])).status_code == 302
    assert Dataset.objects.get().deleted_at is not None


def test_files_of_a_workspace_are_created_saved_moved_copied_and_deleted(customer, owner_page, monkeypatch):
    entry = reverse("workspace_new_entry", args=["main"])
    assert owner_page.post(entry, {"folder": "", "name": "notes", "kind": "folder"}).status_code == 302
    created = owner_page.post(entry, {"folder": "notes", "name": "a.md", "kind": "file"})
    assert created["Location"] == reverse("workspace_file", args=["main", "notes/a.md"]) + "?new=1"
    save = reverse("workspace_save", args=["main", "notes/a.md"])
    saved = owner_page.post(save, {"text": "\r\nhi\r\n", "version": ""}, content_type="application/json").json()
    assert saved == {"message": "Saved.", "version": files.stat(root=customer.folder, path="notes/a.md").version}
    assert (customer.folder / "notes/a.md").read_bytes() == b"\r\nhi\r\n"
    existing = reverse("workspace_existing", args=["main"])
    for url, invalid in ((save, "{}"), (save, "[" * 100_000), (existing, "1"), (existing, "[" * 100_000)):  # nested too
        assert owner_page.post(url, invalid, content_type="application/json").status_code == 400

    # What an upload of these would replace. A folder stays, and a path out of the workspace is the upload's to refuse.
    would_replace = lambda *paths: owner_page.post(existing, paths, content_type="application/json").json()
    assert would_replace("new.py", "notes/a.md", "notes", "../a") == ["notes/a.md"]
    with monkeypatch.context() as patch:
        patch.setattr(workspaces, "MAX_EXISTING_NAMED", 1)
        assert would_replace("notes/a.md") == ["notes/a.md"]
        assert would_replace("notes/a.md", "notes/a.md") == ["notes/a.md", "…"]
        patch.setattr(workspaces, "MAX_PATHS_LOOKED_UP", 2)
        assert would_replace("a", "b") == []
        assert would_replace("a", "b", "c") is None, "it is unknown, so the page asks"

    def send(name, source, target):
        form = {"source": source, "target": target}
        return owner_page.post(reverse(name, args=["main"]), form, follow=True).text

    for outside in ("../secret", "a/../../secret"):
        assert "leaves its folder" in send("workspace_move", "notes/a.md", outside)
    send("workspace_move", "notes/a.md", "b.md")
    assert "Copied to c/d.md." in send("workspace_copy_entry", "b.md", "c/d.md")
    assert "already exists" in send("workspace_copy_entry", "b.md", "c/d.md")
    send("workspace_copy_entry", "c", "c/again")
    assert (customer.folder / "c/again/d.md").read_bytes() == (customer.folder / "b.md").read_bytes()
    owner_page.post(reverse("workspace_delete_entry", args=["main"]), {"path": "b.md"})
    assert not (customer.folder / "b.md").exists()


def test_a_save_over_another_one_shows_both_texts_and_loses_none(customer, owner_page):
    customer.write("a.py", "1\nold\n")
    version = re.search(
        'name="version" value="([^"]+)"', owner_page.get(reverse("workspace_file", args=["main", "a.py"])).text
    )
    save = lambda text, version: owner_page.post(
        reverse("workspace_save", args=["main", "a.py"]), {"text": text, "version": version}, "application/json"
    )
    customer.write("a.py", "1\ntheirs\n")
    refused = save("1\nmine\n", version[1])
    conflict = refused.json()
    assert (refused.status_code, conflict["text"]) == (409, "1\ntheirs\n")
    assert conflict["diff"] == [[" ", "1"], ["-", "theirs"], ["+", "mine"]]
    assert save("a new file", "").status_code == 409  # no version: the editor takes the file for a new one
    assert (customer.folder / "a.py").read_text() == "1\ntheirs\n"
    assert save("1\nmine\n", conflict["version"]).status_code == 200
    (customer.folder / "a.py").unlink()
    deleted = save("1\nmine\n", conflict["version"]).json()
    assert (deleted["text"], deleted["version"]) == ("", "")
    assert save("1\nmine\n", "").status_code == 200
    (customer.folder / "a.py").write_bytes(b"\0")  # now it is not text
    assert save("x", "").status_code == 400


def test_a_large_folder_is_shown_in_pages_folders_first(customer, owner_page, monkeypatch):
    monkeypatch.setattr(workspaces, "PAGE_ROWS", 2)
    for name in ("a", "b", "c"):
        customer.write(f"many/{name}", "")
    customer.write("many/z/file", "")
    url = reverse("workspace_folder", args=["main", "many"])
    shown = [owner_page.get(url).text]
    while following := re.search(r'rel="next" href="([^"]+)"', shown[-1]):
        shown.append(owner_page.get(url + html.unescape(following[1])).text)
    names = [re.findall(r"(?:folder|file)/many/(\w)\"", page) for page in shown]
    assert names == [["z", "a"], ["b", "c"]]
    assert "Your organization uses" in shown[0]
    DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"), number=1)
    for page in (url, reverse("dataset_version", args=["digits", 1])):
        assert owner_page.get(f"{page}?after=x").status_code == 302, page  # an invalid position leads to the first page


def test_a_deleted_file_is_found_restored_and_removed_in_the_recycle_bin(customer, owner_page):
    customer.write("notes/plan.md", "# Plan")
    search = reverse("workspace_search", args=["main"])
    assert "notes/plan.md" in owner_page.get(search, {"q": "PLAN"}).text
    assert "has “absent” in its name" in owner_page.get(search, {"q": "absent", "path": "notes"}).text
    deleted = owner_page.post(reverse("workspace_delete_entry", args=["main"]), {"path": "notes"}, follow=True)
    assert "notes was moved to the recycle bin." in deleted.text
    item = DeletedFile.objects.get()
    page = owner_page.get(reverse("workspace_bin", args=["main"])).text
    assert reverse("workspace_bin_restore", args=["main", item.pk]) in page
    assert "Recycle bin of main" in owner_page.get(reverse("storage_usage")).text
    owner_page.post(reverse("workspace_bin_restore", args=["main", item.pk]))
    assert (customer.folder / "notes/plan.md").read_text() == "# Plan"
    assert owner_page.post(reverse("workspace_bin_restore", args=["main", item.pk])).status_code == 404
    for action in ("workspace_bin_remove", "workspace_bin_empty"):
        owner_page.post(reverse("workspace_delete_entry", args=["main"]), {"path": "notes"})
        arguments = ["main", DeletedFile.objects.get().pk] if action == "workspace_bin_remove" else ["main"]
        owner_page.post(reverse(action, args=arguments))
        assert not DeletedFile.objects.exists()
        customer.write("notes/plan.md", "# Plan")


def test_a_workspace_starts_with_an_example_or_a_copy(owner_page):
    create = lambda **form: owner_page.post(reverse("workspace_new"), form)
    page = owner_page.get(reverse("workspace_new")).text
    assert '<option value="mnist_ddp">mnist_ddp: Train a small' in page
    assert create(name="one", template="mnist_ddp").status_code == 302
    workspace = Workspace.objects.get(name="one")
    script = files.read_text(root=selectors.workspace_folder(workspace), path="mnist_ddp.py")
    assert script == (settings.BASE_DIR / "examples" / "mnist_ddp.py").read_text()
    (selectors.workspace_folder(workspace) / "link").symlink_to("/etc")  # a copy leaves links out
    assert create(name="two", copy_of="one").status_code == 302
    copy = Workspace.objects.get(name="two")
    assert [entry.name for entry in files.list_folder(root=selectors.workspace_folder(copy)).entries] == [
        "mnist_ddp.py"
    ]
    assert (copy.size_bytes, copy.entry_count) == (workspace.size_bytes, 2)  # the folder itself, and the script
    assert "Choose an example, a workspace" in create(name="three", template="mnist_ddp", copy_of="one").text
    for invalid in ({"template": "../settings"}, {"copy_of": "none"}):
        assert "Select a valid choice" in create(name="three", **invalid).text


PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
"""A picture of one pixel."""


def test_pictures_are_shown_and_never_as_anything_else(customer, owner_page):
    (customer.folder / "plot.png").write_bytes(PNG)
    picture = lambda path: owner_page.get(reverse("workspace_picture", args=["main", path]))
    page = owner_page.get(reverse("workspace_file", args=["main", "plot.png"])).text
    assert 'src="/workspaces/w/main/picture/plot.png"' in page
    shown = picture("plot.png")
    assert b"".join(shown.streaming_content) == PNG
    headers = ("Content-Type", "X-Content-Type-Options", "Content-Security-Policy")
    assert [shown[name] for name in headers] == ["image/png", "nosniff", "default-src 'none'; sandbox"]
    (customer.folder / "weights.bin").write_bytes(b"\0\1")
    page = owner_page.get(reverse("workspace_file", args=["main", "weights.bin"])).text
    assert ("This file is not text" in page, "editor.js" in page) == (True, False)
    customer.write("evil.svg", "<svg onload='alert(1)'/>")
    customer.write("evil.png", "<html>")
    assert [picture(path).status_code for path in ("evil.svg", "evil.png", "none.png", "../x")] == [404] * 4


def test_a_notebook_shows_its_cells_and_no_html(customer, owner_page):
    html_output = {"output_type": "display_data", "data": {"text/html": "<b id=evil>", "text/plain": ["a ", "figure"]}}
    png_output = {"output_type": "display_data", "data": {"image/png": base64.b64encode(PNG).decode()}}
    not_png = {"output_type": "display_data", "data": {"image/png": base64.b64encode(b"<svg>").decode()}}
    error = {"output_type": "error", "traceback": ["\x1b[31mValueError\x1b[0m: <x>"]}
    cells = [
        {"cell_type": "markdown", "source": ["# <script>alert(1)</script>"]},
        {"cell_type": "code", "source": "plot()", "execution_count": 7,
         "outputs": [html_output, png_output, not_png, error]},
    ]  # fmt: skip
    customer.write("plot.ipynb", json.dumps({"cells": cells}))
    url = reverse("workspace_file", args=["main", "plot.ipynb"])
    page = owner_page.get(url).text
    for text in ("# &lt;script&gt;", "In [7]", "plot()", "a figure", "ValueError: &lt;x&gt;"):
        assert text in page
    assert page.count("data:image/png;base64,iVBOR") == 1
    assert "evil" not in page
    assert "editor.js" in owner_page.get(url, {"source": 1}).text
    # The last one is nested more deeply than Python's JSON reader can follow.
    for broken in ("{", "[]", '{"cells": [1]}', '{"cells": [{}]}', "[" * 100_000):
        customer.write("plot.ipynb", broken)
        assert "editor.js" in owner_page.get(url).text


def test_a_top_up_needs_a_valid_amount(owner_page):
    for amount in ("", "abc", "1.999", "NaN", "0.01"):
        answer = owner_page.post(reverse("top_up"), {"amount": amount})
        assert (answer.status_code, "invalid-feedback" in answer.text) == (422, True), amount
    assert not TopUp.objects.exists()


def test_a_quote_shows_errors_at_touched_fields_only(customer, owner_page):
    ask = lambda **changes: owner_page.post(reverse("training_quote"), customer.form(**changes)).text
    no_error = 'id="error-{}" role="alert" hx-swap-oob="true"></div>'
    invalid = ask(touched=TOUCHED, lr="abc", max_time="soon")
    assert "The learning rate must be a number" in invalid
    assert "Enter a number or leave the field empty." in invalid
    assert no_error.format("epochs") in invalid
    untouched = ask(touched="", code_path="")
    assert "To see the price" in untouched
    assert no_error.format("code_path") in untouched
    priced = ask(touched=TOUCHED, max_time="30")
    assert "data-ceiling" in priced
    assert no_error.format("lr") in priced


def test_a_script_is_picked_from_a_tree_and_read(customer, stranger, owner_page, browser):
    customer.write("src/net/large.py", "epochs = os.environ['EPOCHS']\n# os.environ['LR']\n<script>")
    (customer.folder / "bytes.py").write_bytes(b"\0\xff")
    (customer.folder / "link.py").symlink_to("/etc/passwd")
    tree = owner_page.get(reverse("training_scripts"), {"workspace": customer.workspace.name}).text
    assert 'id="script-tree"' in tree
    assert "<span>net</span>" in tree
    assert 'data-value="src/net/large.py"' in tree
    data = {"workspace": customer.workspace.name}
    read = lambda client, path: client.get(reverse("training_script"), data | {"code_path": path}).text
    shown = read(owner_page, "src/net/large.py")
    assert "<code>EPOCHS</code>" in shown
    assert "<code>LR</code>" not in shown
    assert "&lt;script&gt;" in shown
    assert "This file is not text." in read(owner_page, "bytes.py")
    for path in ("link.py", "../train.py", "/etc/passwd", "missing.py", "src", "a\0b.py"):
        assert "script-text" not in read(owner_page, path)
    assert "script-text" not in read(browser(stranger), "train.py")
    assert "Choose a script" in read(owner_page, "")
    customer.write("src/net-2/x.py", "")
    customer.write("src/net/deep/x.py", "")
    tree = owner_page.get(reverse("training_scripts"), {"workspace": customer.workspace.name}).text
    assert re.findall(r"<span>(net-2|net|deep)</span>", tree) == ["net", "deep", "net-2"], "by name, not by path"


def test_scripts_are_searched_in_a_limited_number_of_folders(customer, owner_page, monkeypatch):
    monkeypatch.setattr(training, "MAX_FOLDERS", 2)  # of five: the top, and the first in it
    for name in ("a", "b", "c", "d"):
        customer.write(f"{name}/script.py", "")
    offered = owner_page.get(reverse("training_scripts"), {"workspace": customer.workspace.name}).text
    assert re.findall(r'<option value="(\w/\w+\.py)"', offered) == ["a/script.py"]


def test_a_quote_is_compared_with_other_nodes(customer, owner_page):
    card = owner_page.post(reverse("training_quote"), customer.form()).text
    address = reverse("training_comparison", args=[Quote.objects.get().pk])
    assert f'hx-get="{address}"' in card
    compared = owner_page.get(address).text
    assert [f'data-choose-nodes="{nodes}"' in compared for nodes in (1, 2, 4)] == [True, True, True]
    assert "Starts now" in compared
    (customer.folder / "train.py").unlink()
    assert owner_page.get(address).text == ""


def test_a_limit_must_be_a_number_and_a_huge_id_causes_no_server_error(customer, owner_page):
    for typed in ("1e999999", "-1e999999", "NaN", ENDLESS, "1,000"):
        for limit in ({"max_time": typed, "ceiling": ""}, {"max_time": "", "ceiling": typed}):
            card = owner_page.post(
                reverse("training_quote"), customer.form(touched="max_seconds,ceiling_minor", **limit)
            ).text
            assert "Enter a number or leave the field empty." in card, typed[:9]
    assert owner_page.post(reverse("training_quote"), customer.form(rerun_of=ENDLESS)).status_code == 200
    assert owner_page.get(reverse("training_new"), {"rerun": ENDLESS}).status_code == 200
    assert owner_page.post(reverse("organization_switch"), {"organization": ENDLESS}).status_code == 404


def test_a_quote_that_is_submitted_twice_is_bought_once(customer, owner_page):
    forged_key = "\0" + "k" * 5000  # the key in the console's form is a UUID
    sent = {"quote": str(customer.quote().pk), "idempotency_key": forged_key}
    redirects = {owner_page.post(reverse("training_order"), sent)["HX-Redirect"] for _ in range(2)}
    assert redirects == {reverse("job_detail", args=[Job.objects.get().pk])}
    assert Order.objects.count() == 1


def test_a_wallet_with_too_little_money_leads_to_a_top_up(db, backend, browser):
    poor = Customer(backend, balance_minor=10)
    client = browser(poor.membership)
    form = poor.form(touched=TOUCHED, max_time="1", max_time_unit="hours")
    answer = client.post(reverse("training_quote"), form).text
    # Two nodes for an hour at 0.90, less the balance, would be 170: the smallest top-up is more.
    assert reverse("wallet") + "?amount=500#top-up" in answer
    assert 'id="buy"' not in answer
    sent = {"quote": str(poor.quote().pk), "idempotency_key": "too-poor"}
    assert "alert-danger" in client.post(reverse("training_order"), sent).text
    assert 'value="5.00"' in client.get(reverse("wallet"), {"amount": "170"}).text
    assert 'value="71.70"' in client.get(reverse("wallet"), {"amount": "7170"}).text


def test_the_form_of_a_rerun_has_the_values_of_the_job_to_mark_changes(completed_job, owner_page):
    answer = owner_page.get(reverse("training_new"), {"rerun": completed_job.pk}).text
    assert 'name="epochs" inputmode="numeric" value="10"' in answer
    assert f'name="rerun_of" value="{completed_job.pk}"' in answer
    answer = owner_page.get(reverse("training_new"), {"rerun": completed_job.pk, "epochs": "30"}).text
    earlier = json.loads(html.unescape(re.search(r'data-earlier="([^"]*)"', answer)[1]))
    assert (earlier["epochs"], earlier["lr_scaling"], earlier["warmup_epochs"]) == (["10"], ["none"], [])
    assert 'name="epochs" inputmode="numeric" value="30"' in answer
    assert "data-earlier" not in owner_page.get(reverse("training_new")).text


def test_members_are_changed_and_removed(owner_page, customer, stranger):
    member = MembershipFactory(organization=customer.organization, role=Role.MEMBER)
    remove = lambda pk: owner_page.post(reverse("organization_member_remove", args=[pk]), follow=True)
    owner_page.post(reverse("organization_member_role", args=[member.pk]), {"role": "viewer"})
    member.refresh_from_db()
    assert member.role == Role.VIEWER
    remove(member.pk)
    assert not Membership.objects.filter(pk=member.pk).exists()
    assert "An organization needs at least one owner" in remove(customer.membership.pk).text
    assert remove(stranger.pk).status_code == 404


def test_the_chosen_organization_is_kept_after_logging_in_again(owner_page, customer, stranger):
    switch = lambda pk: owner_page.post(reverse("organization_switch"), {"organization": pk})
    assert switch(stranger.organization_id).status_code == 404
    viewer = MembershipFactory(user=customer.membership.user, role=Role.VIEWER)
    switch(viewer.organization_id)
    # Narrow windows have no top bar, so the page has a switch of its own for them.
    narrow = f'<form class="d-lg-none" method="post" action="{reverse("organization_switch")}">'
    assert narrow in owner_page.get(reverse("overview")).text
    assert owner_page.get(reverse("dataset_new")).status_code == 403  # as a viewer
    del owner_page.cookies[settings.SESSION_COOKIE_NAME]
    owner_page.force_login(customer.membership.user)
    assert owner_page.get(reverse("dataset_new")).status_code == 403
    owner_page.cookies["organization"] = "x" * 99
    assert owner_page.get(reverse("dataset_new")).status_code == 200  # as the owner of the first organization
