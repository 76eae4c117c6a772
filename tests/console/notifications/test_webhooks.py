"""Webhooks: signed deliveries, retries, refused addresses, and the pages on which owners manage them."""

import hashlib
import hmac
import json
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from django.urls import reverse
from django.utils import timezone

from console.accounts.models import AuditEvent
from console.core.errors import InvalidInput
from console.notifications import delivery, services
from console.notifications.models import Delivery, Notification, Webhook
from tests.factories.accounts import MembershipFactory
from tests.http_server import serving

pytestmark = pytest.mark.django_db
DATA = {"amount_minor": 500, "currency": "USD"}


class Receiver(ThreadingHTTPServer):
    """A customer's program. Answers with the next of `statuses` and with `reason`, and keeps what it got."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses, self.reason, self.requests = [], None, []
        self.url = f"http://127.0.0.1:{self.server_port}/hooks?team=1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, dict(self.headers), body))
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200, self.server.reason)
        self.send_header("Location", "/elsewhere")  # counts with status 302 alone
        self.end_headers()

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def receiver(settings):
    """A running Receiver at a private address, to which the console may send in this test."""
    settings.WEBHOOK_PRIVATE_ADDRESSES = True
    with serving(Receiver()) as server:
        yield server


def publish(organization, kind="wallet.topped_up"):
    services.publish(organization=organization, kind=kind, data=DATA)
    delivery.create_deliveries()


def make_retries_due():
    Delivery.objects.update(due_at=timezone.now())


def test_a_receiver_can_verify_what_it_gets(owner, receiver):
    _webhook, secret = services.create_webhook(membership=owner, url=receiver.url, kinds=["wallet.topped_up"])
    publish(owner.organization, "job.failed")  # of another kind
    publish(MembershipFactory().organization)  # of another organization
    publish(owner.organization)
    assert delivery.create_deliveries() == 0  # `publish` has created all
    assert (delivery.deliver_due(), delivery.deliver_due()) == (1, 0)

    [(path, headers, body)] = receiver.requests
    content = json.loads(body)
    assert (path, headers["Trainyard-Event"]) == ("/hooks?team=1", content["kind"])
    assert content["kind"] == "wallet.topped_up"
    assert (content["organization"], content["data"]) == (owner.organization.slug, DATA)
    time, value = (part.partition("=")[2] for part in headers["Trainyard-Signature"].split(","))
    assert value == hmac.new(secret.encode(), time.encode() + b"." + body, hashlib.sha256).hexdigest()
    assert Delivery.objects.get().state == "delivered"


def test_a_failed_delivery_is_tried_again_with_the_same_key_and_given_up_at_last(owner, receiver):
    services.create_webhook(membership=owner, url=receiver.url)
    receiver.statuses = [500, 302]  # then 200
    publish(owner.organization)
    for _try in range(3):
        delivery.deliver_due()
        assert delivery.deliver_due() == 0  # not before its time
        make_retries_due()
    assert len({headers["Trainyard-Delivery"] for _path, headers, _body in receiver.requests}) == 1
    assert [path for path, _headers, _body in receiver.requests] == ["/hooks?team=1"] * 3  # follows no redirect
    assert Delivery.objects.get().state == "delivered"

    receiver.statuses, receiver.reason = [503] * 10, "a\0b"  # more than the console tries; PostgreSQL stores no NUL
    publish(owner.organization)
    for _try in range(10):
        delivery.deliver_due()
        make_retries_due()
    failed = Delivery.objects.latest("pk")
    assert (failed.state, failed.tries, failed.status) == ("failed", len(delivery.RETRY_SECONDS) + 1, 503)
    assert failed.error == "a\ufffdb"


def test_a_delivery_that_is_sent_again_during_a_round_stays_due(owner, receiver, monkeypatch):
    webhook, _secret = services.create_webhook(membership=owner, url=receiver.url)
    publish(owner.organization)
    receiver.statuses = [500]  # then 200
    body_of = delivery.body_of

    def send_again(row):
        services.redeliver(webhook=webhook, delivery_pk=row.pk)
        return body_of(row)

    with monkeypatch.context() as patch:
        patch.setattr(delivery, "body_of", send_again)
        assert delivery.deliver_due() == 0
    assert delivery.deliver_due() == 1  # at once, without the pause before a retry


def test_a_webhook_with_a_backlog_delays_no_other(owner, receiver, monkeypatch):
    monkeypatch.setattr(delivery, "ROUND_SIZE", 2)
    services.create_webhook(membership=owner, url=receiver.url)
    for _notification in range(9):
        publish(owner.organization)
    services.create_webhook(membership=owner, url=receiver.url)
    publish(owner.organization)
    assert delivery.deliver_due() == 2
    # One of each webhook: the nine of the first must not delay the second's.
    assert {sent.webhook_id for sent in Delivery.objects.filter(state="delivered")} == {
        webhook.pk for webhook in services.webhooks_of(owner.organization)
    }


def test_a_url_that_is_invalid_or_not_https_is_refused(owner):
    for url in (
        "http://hooks.example.com/", "https://user:pass@example.com/", "https://", "ftp://example.com", "javascript:x",
        "https://example.com/#part", "https://exämple.com/ x", "https://example.com:0/",
        f"https://example.com/{'x' * 500}", "https://:pass@example.com/",
    ):  # fmt: skip
        with pytest.raises(InvalidInput) as refused:
            services.create_webhook(membership=owner, url=url)
        assert "url" in refused.value.fields, url


def test_no_private_address_is_reached(owner):
    hosts = ("127.0.0.1", "[::1]", "10.0.0.1", "169.254.169.254", "localhost")
    for host in hosts:
        services.create_webhook(membership=owner, url=f"https://{host}:1/")
    publish(owner.organization)
    assert delivery.deliver_due() == 0
    assert list(Delivery.objects.values_list("error", flat=True)) == ["The host has no public address."] * len(hosts)


def test_old_notifications_go_with_their_deliveries(owner, receiver):
    services.create_webhook(membership=owner, url=receiver.url)
    publish(owner.organization)
    Notification.objects.update(created_at=timezone.now() - delivery.RETENTION - timedelta(days=1))
    publish(owner.organization)
    delivery.delete_old()
    assert Delivery.objects.count() == Notification.objects.count() == 1


def test_a_webhook_for_a_kind_of_a_later_version_is_shown(client, owner):
    """After a return to the earlier version, the page would fail if it looked up the title of every kind."""
    Webhook.objects.create(organization=owner.organization, url="https://a.example/", kinds=["job.teleported"])
    client.force_login(owner.user)
    assert "job.teleported" in client.get(reverse("webhook_list")).text


def test_an_owner_creates_reads_and_deletes_webhooks_on_the_pages(client, owner, receiver):
    client.force_login(owner.user)
    page = reverse("webhook_list")
    assert "Enter an address" in client.post(page, {"url": "nonsense"}).text
    assert "whsec_" in client.post(page, {"url": receiver.url}).text
    assert "whsec_" not in client.get(page).text
    receiver.statuses = [410] * 9  # more than the console tries
    publish(owner.organization)
    for _try in delivery.RETRY_SECONDS:
        delivery.deliver_due()
        make_retries_due()
    delivery.deliver_due()  # the last try: now it has failed
    [sent] = Delivery.objects.all()
    log = client.get(reverse("webhook_detail", args=[sent.webhook_id])).text
    assert "410" in log
    receiver.statuses = []
    client.post(reverse("webhook_send_again", args=[sent.webhook_id, sent.pk]))
    assert delivery.deliver_due() == 1
    client.post(reverse("webhook_delete", args=[sent.webhook_id]))
    assert not Delivery.objects.exists()
    assert AuditEvent.objects.filter(action="webhook.deleted", target=receiver.url).exists()
