import pytest
from django.urls import reverse

from jobs.models import Job, Order, Product
from runtime.specs import Outcome
from tests.factories.accounts import UserFactory


@pytest.fixture
def admin(client, customer):
    client.force_login(UserFactory(is_staff=True, is_superuser=True))
    return client


def test_jobs_and_orders_are_there_to_be_read_and_for_nothing_else(admin, customer):
    job = customer.end(customer.started(), Outcome.CODE_FAILED, message="Rank 1 exited.")
    for model, row in (("job", job), ("order", job.order)):
        assert admin.get(reverse(f"admin:jobs_{model}_changelist"), {"q": "1"}).status_code == 200
        page = reverse(f"admin:jobs_{model}_change", args=[row.pk])
        answer = admin.get(page)
        assert answer.status_code == 200
        assert 'name="_save"' not in answer.content.decode()
        assert admin.get(reverse(f"admin:jobs_{model}_add")).status_code == 403
        assert admin.post(reverse(f"admin:jobs_{model}_delete", args=[row.pk]), {"post": "yes"}).status_code == 403
        assert admin.post(page, {"state": "succeeded"}).status_code == 403
    shown = admin.get(reverse("admin:jobs_job_change", args=[job.pk])).content.decode()
    assert "Rank 1 exited." in shown
    assert "ordered" in shown
    assert Job.objects.get().state == "failed"
    assert Order.objects.count() == 1


def test_the_list_of_jobs_asks_as_much_for_many_as_for_one(admin, customer, django_assert_max_num_queries):
    for _ in range(8):
        customer.job(nodes=1)
    with django_assert_max_num_queries(9):
        assert admin.get(reverse("admin:jobs_job_changelist")).status_code == 200


def test_products_are_the_administrators_but_their_names_stay(admin, customer):
    product = Product.objects.get(name="metered")
    page = reverse("admin:jobs_product_change", args=[product.pk])
    form = {
        "name": "renamed", "title": "Training by the second", "description": "", "mode": "fixed", "position": 1,
        "reference_seconds_per_epoch": "5", "headroom": "3", "max_epochs": 10, "max_nodes": 2, "max_seconds": 600,
        "is_active": "on",
    }  # fmt: skip
    assert admin.post(page, form).status_code == 302
    product.refresh_from_db()
    assert (product.title, product.max_nodes) == ("Training by the second", 2)
    assert (product.name, product.mode) == ("metered", "metered")
    assert admin.post(page, form | {"headroom": "0.5"}).status_code == 200
    assert admin.post(reverse("admin:jobs_product_delete", args=[product.pk]), {"post": "yes"}).status_code == 403
    assert admin.get(reverse("admin:jobs_product_changelist")).status_code == 200


def test_a_customer_has_no_business_here(client, customer):
    client.force_login(customer.membership.user)
    assert client.get(reverse("admin:jobs_job_changelist")).status_code == 302
