"""What the operator sets in `/admin/`: the brand, legal texts, and notices to everyone."""

import io
import re
from datetime import timedelta

import pytest
from django.core import mail
from django.core.files.uploadedfile import SimpleUploadedFile
from django.urls import reverse
from django.utils import timezone
from PIL import Image

from console.accounts import invitations, services
from console.accounts.models import AuditEvent, Membership
from console.accounts.roles import Role
from console.installation import selectors
from console.installation.models import MAX_LOGO_BYTES, Brand, LegalText, Notice, contrast
from console.web.installation import DARK_CARD, mix
from tests.factories.accounts import MembershipFactory, logged_in

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _empty_cache():
    selectors.clear_cache()
    yield
    selectors.clear_cache()


def picture(width, height, file_format="PNG"):
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, file_format)
    return file.getvalue()


def test_the_operator_sets_name_logo_colour_and_support(admin, client):
    form = {"name": "Rail <Lab>", "color": "#0b6e4f", "support": "help@rail.example"}
    logo = picture(28, 28)
    page = reverse("admin:installation_brand_add")
    assert admin.post(page, form | {"logo_file": SimpleUploadedFile("l.png", logo)}).status_code == 302
    assert admin.get(page).status_code == 403  # there is one brand

    client.logout()
    shown = client.get(reverse("account_login")).content.decode()
    assert "Rail &lt;Lab&gt;" in shown
    assert 'href="mailto:help@rail.example"' in shown
    style = client.get(reverse("brand_style"))
    assert style.headers["Content-Type"] == "text/css"
    assert {"--tblr-primary: #0b6e4f;", "--tblr-link-color: #0b6e4f;"} <= set(
        re.findall(r"--\S+: \S+", style.content.decode())
    )
    assert client.get(reverse("brand_logo")).content == logo
    invitations.invite(
        organization=(owner := MembershipFactory(role=Role.OWNER)).organization,
        email="new@rail.example",
        role=Role.MEMBER,
        actor=owner.user,
    )
    invitations.send_due()
    assert "on Rail <Lab>." in mail.outbox[-1].body


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("color", "red;}", "Enter a colour"),
        ("color", "#ffee00", "cannot be read well"),
        ("support", "javascript:alert(1)", "Enter an email address"),
        ("logo_file", b"<svg onload=alert(1)>", "Choose a PNG picture"),
        ("logo_file", picture(64, 64)[:-20], "Choose a PNG picture"),
        ("logo_file", picture(64, 64) + bytes(MAX_LOGO_BYTES), "Choose a PNG picture"),
        ("logo_file", picture(64, 64, "JPEG"), "Choose a PNG picture"),
        ("logo_file", picture(27, 27), "27 × 27 pixels. Choose a square one"),  # of 28 to 1024 pixels
        ("logo_file", picture(64, 63), "64 × 63 pixels. Choose a square one"),
        ("logo_file", picture(1025, 1025), "1025 × 1025 pixels. Choose a square one"),
    ],
)
def test_an_invalid_brand_is_refused_at_its_field(admin, field, value, sentence):
    value = SimpleUploadedFile("l.png", value) if isinstance(value, bytes) else value
    answer = admin.post(reverse("admin:installation_brand_add"), {"name": "Rail", field: value})
    assert sentence in str(answer.context["adminform"].form.errors[field])
    assert not Brand.objects.exists()


def test_text_in_the_brands_colour_can_be_read_in_the_dark_theme(client):
    for color in ("#000000", "#0000ff", "#7a0000", "#0b6e4f", "#3454d1", "#767676"):
        Brand.objects.create(color=color)  # replaces the one before
        style = client.get(reverse("brand_style")).content.decode()
        _light, dark = re.findall(r"--tblr-primary: (#\w{6})", style)
        for background in (DARK_CARD, mix(DARK_CARD, dark, 0.12)):  # a card, and one with a tint of the colour
            assert contrast(dark, background) >= 4.5, (color, dark)  # what WCAG AA demands of text


def test_terms_have_versions_that_are_accepted_anew_and_never_change(admin, client):
    membership: Membership = MembershipFactory(role=Role.OWNER)
    services.activate_service(membership=membership, accept_terms=True)
    add = reverse("admin:installation_legaltext_add")
    form = {"kind": "terms", "version": "2027-01", "text": "Pay <b>fairly</b>.\n\nBe kind."}
    assert admin.post(add, form).status_code == 302
    assert "already exists" in admin.post(add, form).content.decode()
    text = LegalText.objects.get()
    assert admin.post(reverse("admin:installation_legaltext_change", args=[text.pk]), form).status_code == 403

    client.force_login(membership.user)
    page = client.get(reverse("activation")).content.decode()
    assert "Pay &lt;b&gt;fairly&lt;/b&gt;." in page
    assert "Accept these terms" in page
    client.post(reverse("activation"), {"accept_terms": "on"})
    assert "Accept these terms" not in client.get(reverse("activation")).content.decode()
    accepted = AuditEvent.objects.filter(action="service.activated").order_by("pk")
    assert [event.data["terms_version"] for event in accepted][-1] == "2027-01"
    assert len(accepted) == 2

    client.logout()
    assert "Be kind." in client.get(reverse("legal_text", args=["terms"])).content.decode()
    assert [client.get(reverse("legal_text", args=[kind])).status_code for kind in ("privacy", "other")] == [404, 404]


def test_a_notice_is_on_every_page_in_its_time_until_it_is_deleted(admin):
    now = timezone.now()
    notice = Notice.objects.create(text="Maintenance <soon>", begins_at=now)
    Notice.objects.create(text="not yet", begins_at=now + timedelta(hours=1))
    Notice.objects.create(text="over", begins_at=now - timedelta(hours=2), ends_at=now - timedelta(hours=1))
    member = logged_in(MembershipFactory().user)
    for page in ("overview", "job_list"):
        shown = member.get(reverse(page)).content.decode()
        assert "Maintenance &lt;soon&gt;" in shown
        assert not re.search("not yet|over<", shown)  # "over" alone is in "overview"
    form = {"action": "delete_selected", "_selected_action": [notice.pk], "post": "yes"}
    assert admin.post(reverse("admin:installation_notice_changelist"), form).status_code == 302
    assert "Maintenance" not in member.get(reverse("overview")).content.decode()
