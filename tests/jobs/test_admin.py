import pytest
from django.urls import reverse

from console.accounts.models import User

pytestmark = pytest.mark.django_db


@pytest.fixture
def administrator(client):
    client.force_login(User.objects.create_superuser("root@example.com", "a good password"))
    return client


def test_a_job_is_shown_with_its_attempts_and_events_and_can_not_be_edited(administrator, customer):
    job = customer.job()
    page = administrator.get(reverse("admin:jobs_job_change", args=[job.pk]))
    assert page.status_code == 200
    assert b"ordered" in page.content
    assert administrator.post(reverse("admin:jobs_job_change", args=[job.pk]), {"state": "failed"}).status_code == 403
    job.refresh_from_db()
    assert job.state == "queued"


@pytest.mark.parametrize("name", ["job", "order", "product"])
def test_lists_render(administrator, customer, name):
    customer.job()
    assert administrator.get(reverse(f"admin:jobs_{name}_changelist")).status_code == 200


def test_what_was_sold_keeps_its_name_and_mode(administrator, customer):
    product = customer.job().order.product
    page = administrator.get(reverse("admin:jobs_product_change", args=[product.pk]))
    assert page.status_code == 200
    assert b'name="mode"' not in page.content
