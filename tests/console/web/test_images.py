"""Pages of a customer's own images and their registries, and which image the training form selects."""

import re
from http import HTTPStatus

import pytest
from django.urls import reverse

from console.accounts.models import AuditEvent
from jobs import images
from jobs.models import Job
from runtime.errors import InvalidSpec
from runtime.images.contents import Contents
from runtime.specs import Controller
from storage import registries
from storage.models import Image, Registry

pytestmark = pytest.mark.django_db
MINE = {
    "name": "a-mine",  # the first by name, yet not the default
    "title": "Mine",
    "reference": "registry.example.com:5000/team/train:1",
    "frameworks": ["pytorch", "horovod"],
}
CHANGED = {"title": "Ours", "reference": "registry.example.com/team/train:2"}


def test_an_image_that_cannot_run_is_not_a_default(customer, owner_page, monkeypatch):
    def check(image, _controller=Controller.GLOO, *, gpus=0):
        if image.reference:
            raise InvalidSpec("This cluster runs built-in images only.", field="image")

    monkeypatch.setattr(customer.backend, "check_image", check)
    assert "This installation runs built-in environments" in owner_page.get(reverse("image_new")).content.decode()
    created = owner_page.post(reverse("image_new"), MINE, follow=True).content.decode()
    assert "it cannot run a-mine. Choose a built-in image" in created
    form = owner_page.get(reverse("training_new")).content.decode()
    options = re.search(r'<select[^>]*id="image".*?</select>', form, re.DOTALL)
    assert options
    assert re.findall(r'<option value="([^"]*)"[^>]* selected', options[0]) == ["pytorch"]
    assert re.search(r'value="a-mine"[^>]* data-not-ready', options[0])
    quote = owner_page.post(reverse("training_quote"), customer.form() | {"image": "a-mine", "touched": "image"})
    assert "so it cannot run a-mine." in quote.content.decode()
    ready = {each["name"]: each["ready"] for each in owner_page.get("/api/v1/images/").json()["results"]}
    assert (ready["pytorch"], ready["a-mine"]) == (True, False)


def test_an_image_is_edited_deleted_and_created_again(customer, owner_page):
    owner_page.post(reverse("image_new"), MINE)
    edit, delete = (reverse(name, args=["a-mine"]) for name in ("image_edit", "image_delete"))
    refused = owner_page.post(edit, MINE | {"reference": "no"}).content.decode()
    assert "registry.example.com/team/train:1.2" in refused  # the example in the error
    assert owner_page.post(edit, MINE | CHANGED | {"name": "another"}).status_code == 302
    image = Image.objects.get(organization=customer.organization)
    assert (image.name, image.title, image.reference) == ("a-mine", *CHANGED.values())
    assert owner_page.post(delete).status_code == 302
    owner_page.get(reverse("image_list"))  # shows the toasts, which name the image, so that later pages lack them
    assert "a-mine" not in owner_page.get(reverse("training_new")).content.decode()
    assert owner_page.get(edit).status_code == owner_page.post(delete).status_code == 404
    owner_page.post(reverse("image_new"), MINE)
    recreated = Image.objects.get(organization=customer.organization)
    assert (recreated.pk, recreated.reference, recreated.is_active) == (image.pk, MINE["reference"], True)
    actions = AuditEvent.objects.filter(action__startswith="image.").order_by("pk").values_list("action", flat=True)
    assert list(actions) == ["image.created", "image.changed", "image.deleted", "image.created"]
    for name in ("image_edit", "image_delete"):
        assert owner_page.post(reverse(name, args=["pytorch"])).status_code == 404


def test_the_reference_of_an_image_that_an_open_job_needs_stays(customer, owner_page):
    assert owner_page.post("/api/v1/images/", MINE, content_type="application/json").json()["ready"]
    job = customer.job(image="a-mine")
    path = "/api/v1/images/a-mine/"
    patch = lambda **changes: owner_page.patch(path, changes, content_type="application/json")
    for refused in (patch(reference=CHANGED["reference"]), owner_page.delete(path)):
        assert (refused.status_code, f"#{job.pk} " in refused.json()["message"]) == (409, True)
    assert patch(title="Ours").json()["title"] == "Ours"
    no_object = owner_page.patch(path, ["title"], content_type="application/json")
    assert (no_object.status_code, no_object.json()["message"]) == (400, "Send a JSON object.")
    assert owner_page.get(path).json()["reference"] == MINE["reference"]


def test_registry_credentials_are_stored_encrypted_and_never_shown(customer, owner_page):
    form = MINE | {"username": "robot", "password": " s3cret "}
    assert owner_page.post(reverse("image_new"), form).status_code == 302
    registry = Registry.objects.get(organization=customer.organization)
    assert (registry.host, registry.username) == ("registry.example.com:5000", "robot")
    assert registries.password_of(registry) == " s3cret "
    for path in (reverse("image_new"), reverse("image_edit", args=["a-mine"])):
        refused = owner_page.post(path, form | {"reference": "no"})
        assert "s3cret" not in refused.content.decode()
        # Django's reports of errors hide these.
        assert refused.wsgi_request.sensitive_post_parameters == ("password",), path


def test_an_image_is_checked_from_its_page_or_the_training_form_up_to_a_daily_limit(customer, owner_page):
    assert "Check this image" in owner_page.get(reverse("image_list")).content.decode()
    check = lambda **options: owner_page.post(reverse("image_check"), **options)
    form = {"image": "pytorch", "node_spec": "nano", "nodes": "2"}
    path = check(data=form)["Location"]
    assert path == reverse("job_detail", args=[Job.objects.get().pk])
    page = owner_page.get(path).content.decode()
    assert "not checked" in page  # the run has not started
    assert "Run again" not in page  # which would open the training form
    assert owner_page.get(reverse("training_new"), {"rerun": Job.objects.get().pk}).status_code == HTTPStatus.NOT_FOUND
    htmx = {"hx-request": "true"}
    started = check(data=customer.form(), headers=htmx)
    assert started["HX-Redirect"] == reverse("job_detail", args=[Job.objects.latest("pk").pk])
    assert "Enter a whole number from 1" in check(data=customer.form(nodes="0"), headers=htmx).content.decode()
    customer.quota(max_checks_per_day=2)
    assert "The limit is 2 per organization" in check(data=form, follow=True).content.decode()


def test_the_catalogue_shows_what_an_image_contains(owner_page, monkeypatch):
    known = Contents("3.11.7", "12.8", {"pytorch": "2.13.0"}, {"torch": "2.13.0"})
    monkeypatch.setattr(images, "read_contents", lambda _root, name: known if name == "pytorch" else None)
    page = " ".join(owner_page.get(reverse("image_list")).content.decode().split())
    assert "PyTorch 2.13.0</span>" in page
    assert "Python 3.11.7 · CUDA 12.8 · 1 package</summary>" in page
    shown = {each["name"]: each["contents"] for each in owner_page.get("/api/v1/images/").json()["results"]}
    assert shown["pytorch"]["packages"] == {"torch": "2.13.0"}
    assert shown["tensorflow"] is None
