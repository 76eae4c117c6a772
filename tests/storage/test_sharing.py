"""Datasets that other organizations read. `owner` shares, `stranger` is a member of another organization."""

import io
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.utils import timezone

from console.accounts.models import AuditEvent, Organization
from console.accounts.services import create_organization
from console.core.errors import InvalidInput, NotFound
from storage import sharing
from storage.errors import NameTaken
from storage.models import Dataset, DatasetShare
from tests.factories.storage import DatasetFactory, DatasetVersionFactory
from tests.racing import together
from tests.storage.archives import tar_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def dataset(owner):
    return DatasetVersionFactory(dataset=DatasetFactory(organization=owner.organization, name="digits")).dataset


@pytest.fixture
def code(dataset):
    """A code of `dataset` that nobody has entered."""
    return sharing.create_share(dataset=dataset, user=None, label="Acme")[1]


def accept(member, code):
    return sharing.accept_share(organization=member.organization, user=member.user, code=code)


def usable(member):
    return [dataset.name for dataset in sharing.usable_datasets(member.organization)]


def test_a_code_gives_read_access_once(dataset, code, stranger, owner):
    assert usable(stranger) == []
    assert accept(stranger, f" {code}\n") == dataset
    assert usable(stranger) == ["digits"]
    assert sharing.usable_dataset_named(stranger.organization, "digits") == dataset
    third = create_organization(user=stranger.user, name="Third")  # the membership of its owner
    for member in (third, stranger):
        with pytest.raises(InvalidInput):
            accept(member, code)
    assert code not in str(DatasetShare.objects.values())
    with pytest.raises(InvalidInput):
        accept(owner, sharing.create_share(dataset=dataset, user=None, label="self")[1])


def test_wrong_expired_revoked_and_deleted_codes_get_one_answer(dataset, stranger):
    codes = {"wrong": "x" * 32, "empty": "", "odd": "\udfff"}
    for kind in ("expired", "revoked", "deleted"):
        share, codes[kind] = sharing.create_share(dataset=dataset, user=None, label=kind)
        if kind == "expired":
            DatasetShare.objects.filter(pk=share.pk).update(expires_at=timezone.now() - timedelta(seconds=1))
        elif kind == "revoked":
            sharing.revoke_share(share=share, user=None)
    for kind, code in codes.items():
        if kind == "deleted":  # last, since the deletion ends all codes of the dataset
            Dataset.objects.update(deleted_at=timezone.now())
        with pytest.raises(InvalidInput) as refused:
            accept(stranger, code)
        assert refused.value.fields == {"code": sharing.INVALID_CODE}


def test_access_ends_for_new_uses(dataset, code, stranger):
    accept(stranger, code)
    sharing.revoke_share(share=DatasetShare.objects.get(), user=None)
    with pytest.raises(NotFound):
        sharing.usable_dataset_named(stranger.organization, "digits")
    accept(stranger, sharing.create_share(dataset=dataset, user=None, label="again")[1])
    sharing.leave_share(organization=stranger.organization, user=stranger.user, name="digits")
    assert usable(stranger) == []
    with pytest.raises(NotFound):
        sharing.leave_share(organization=stranger.organization, user=stranger.user, name="digits")


def test_a_name_means_the_organizations_own_dataset_then_a_shared_then_a_public_one(dataset, code, stranger):
    public = sharing.publish_public(name="digits", stream=_stream({"a": b"1"}), description="All").dataset
    assert sharing.usable_dataset_named(stranger.organization, "digits") == public
    accept(stranger, code)
    assert sharing.usable_dataset_named(stranger.organization, "digits") == dataset
    own = DatasetFactory(organization=stranger.organization, name="digits")
    assert sharing.usable_dataset_named(stranger.organization, "digits") == own
    assert sharing.one_per_name(sharing.usable_datasets(stranger.organization)) == [own]
    with pytest.raises(NameTaken):
        accept(stranger, sharing.create_share(dataset=dataset, user=None, label="again")[1])
    # The own dataset hides the share, which can be left all the same.
    sharing.leave_share(organization=stranger.organization, user=stranger.user, name="digits")
    assert not DatasetShare.objects.filter(recipient=stranger.organization, revoked_at=None).exists()


def test_a_dataset_that_is_restored_takes_the_place_of_no_other(dataset, code, stranger):
    accept(stranger, code)
    Dataset.objects.filter(pk=dataset.pk).update(deleted_at=timezone.now())
    other = DatasetFactory(name="digits")
    accept(stranger, sharing.create_share(dataset=other, user=None, label="second")[1])
    Dataset.objects.filter(pk=dataset.pk).update(deleted_at=None)
    assert list(sharing.usable_datasets(stranger.organization)) == [other]


def test_public_datasets_belong_to_nobody_who_can_sign_up(stranger):
    squatter = create_organization(user=stranger.user, name=sharing.PUBLIC_OWNER_SLUG)
    version = sharing.publish_public(name="digits", stream=_stream({"a": b"1"}))
    assert version.dataset.organization != squatter.organization
    assert not version.dataset.organization.memberships.exists()


def test_an_administrator_publishes_and_withdraws(dataset, stranger, admin_client, admin_user):
    for action, expected in (("make_public", ["digits"]), ("withdraw", [])):
        data = {"action": action, "_selected_action": [dataset.pk]}
        assert admin_client.post("/admin/storage/dataset/", data).status_code == 302
        assert usable(stranger) == expected
    assert AuditEvent.objects.filter(action="dataset.made_public", actor=admin_user).exists()


def test_publish_dataset_adds_a_public_version(tmp_path, stranger, capsys):
    archive = tmp_path / "digits.tar"
    archive.write_bytes(tar_of({"a": b"1"}))
    for _version in range(2):
        call_command("publish_dataset", "mnist-digits", str(archive), description="Digits")
    assert "mnist-digits v2" in capsys.readouterr().out
    assert usable(stranger) == ["mnist-digits"]


@pytest.mark.slow
def test_publish_digits_publishes_them_once(stranger, capsys):
    for _time in range(2):
        call_command("publish_digits")
    assert "mnist-digits v1: 4 files" in capsys.readouterr().out
    assert usable(stranger) == ["mnist-digits"]


@pytest.mark.usefixtures("dataset")
def test_neither_organization_learns_the_name_of_the_other(api, owner, stranger):
    Organization.objects.filter(pk=owner.organization.pk).update(name="Secret Owner", slug="secret-owner")
    Organization.objects.filter(pk=stranger.organization.pk).update(name="Secret Guest", slug="secret-guest")
    mine, theirs = api(owner), api(stranger)
    created = mine.post("/api/v1/datasets/digits/shares/", {"label": "My label"}).json()
    answers = [theirs.post("/api/v1/shared-datasets/", {"code": created["code"]})]
    assert answers[0].status_code == 201
    answers += [
        theirs.get(f"/api/v1/{path}")
        for path in ("shared-datasets/", "datasets/digits/", "datasets/digits/files/", "datasets/")
    ]
    assert all(answer.status_code == 200 for answer in answers[1:])
    shown = "".join(answer.content.decode() for answer in answers)
    assert not [word for word in ("Secret", "secret", "My label", owner.user.email) if word in shown]
    seen = mine.get("/api/v1/datasets/digits/shares/").content.decode()
    seen += str(list(AuditEvent.objects.filter(organization=owner.organization).values("data", "target", "actor")))
    assert not [word for word in ("Secret Guest", "secret-guest", stranger.user.email) if word in seen]
    assert not AuditEvent.objects.filter(organization=owner.organization, actor=stranger.user).exists()


def test_a_guest_changes_nothing(dataset, code, api, stranger):
    accept(stranger, code)
    client = api(stranger)
    for method, path in (
        ("delete", "datasets/digits/"), ("delete", f"datasets/digits/versions/{dataset.versions.get().number}/"),
        ("put", "datasets/digits/archive/"), ("post", "datasets/digits/shares/"), ("get", "datasets/digits/shares/"),
        ("post", "datasets/digits/versions/"),
    ):  # fmt: skip
        assert getattr(client, method)(f"/api/v1/{path}", {"label": "x"}).status_code == 404, path


@pytest.mark.django_db(transaction=True)
def test_a_code_entered_twice_at_once_works_once(code, stranger):
    third = create_organization(user=stranger.user, name="Third")
    results = together(lambda: accept(stranger, code), lambda: accept(third, code))
    assert sorted(type(result).__name__ for result in results) == ["Dataset", "InvalidInput"]
    assert DatasetShare.objects.exclude(recipient=None).count() == 1


@pytest.mark.django_db(transaction=True)
def test_of_two_codes_for_datasets_of_the_same_name_entered_at_once_one_works(dataset, code, stranger):
    third = create_organization(user=stranger.user, name="Third")
    twin = DatasetFactory(organization=third.organization, name=dataset.name)
    twin_code = sharing.create_share(dataset=twin, user=None, label="Acme")[1]
    results = together(lambda: accept(stranger, code), lambda: accept(stranger, twin_code))
    assert sorted(type(result).__name__ for result in results) == ["Dataset", "NameTaken"]
    assert DatasetShare.objects.exclude(recipient=None).count() == 1


def _stream(files):
    return io.BytesIO(tar_of(files))
