"""The context of a request: its id, its client's address, and the fields that its log lines have."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from console.observability import context
from console.observability.addresses import client_address, connection_key, parse_networks, rate_limit_key

PROXIES = parse_networks(["10.0.0.0/8", " 192.0.2.7", "", "2001:db8:1::/48"])


def test_the_client_is_the_nearest_address_that_is_not_a_proxy():
    for peer, forwarded_for, client in (
        ("198.51.100.1", "203.0.113.9", "198.51.100.1"),  # not a trusted proxy: its header is ignored
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "127.0.0.1, 203.0.113.9", "203.0.113.9"),  # what the client itself wrote is on the left
        ("10.0.0.1", "1.2.3.4, 203.0.113.9, 192.0.2.7", "203.0.113.9"),
        ("10.0.0.1", "10.9.9.9", "10.9.9.9"),  # all are proxies
        ("10.0.0.1", "203.0.113.9, unknown", "10.0.0.1"),  # the nearest entry is no address
        ("10.0.0.1", "203.0.113.9:4711", "203.0.113.9"),
        ("::ffff:10.0.0.1", "[2001:db8:2::5]:443", "2001:db8:2::5"),
        ("fe80::1%eth0", "203.0.113.9", "fe80::1"),
        ("", "203.0.113.9", None),
    ):
        assert client_address(peer, forwarded_for, PROXIES) == client, (peer, forwarded_for)
    with pytest.raises(ImproperlyConfigured, match="TRUSTED_PROXIES: 'proxy'"):
        parse_networks(["10.0.0.1", "proxy"])


def test_an_ipv6_network_counts_as_one_address():
    assert rate_limit_key("2001:db8:2::5") == rate_limit_key("2001:db8:2::6") != rate_limit_key("2001:db8:3::5")
    assert rate_limit_key("203.0.113.9") == "203.0.113.9"


def test_connections_are_counted_by_address_unless_a_proxy_makes_them():
    for peer in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8:1::5", ""):
        assert connection_key(peer, PROXIES) is None, peer
    assert connection_key("::ffff:203.0.113.9", PROXIES) == connection_key("203.0.113.9", PROXIES) == "203.0.113.9"


def test_a_valid_request_id_of_a_proxy_is_kept_and_another_replaced():
    for valid in ("3f2a91c0d1e2", "req:0123-4567.89_a", "a" * 64):
        assert context.request_id(valid) == valid
    for invalid in ("", "short", "a" * 65, "with space", 'quo"te12345', "line\nbreak123", "-dash1234"):
        first, second = context.request_id(invalid), context.request_id(invalid)
        assert context.VALID_ID.fullmatch(first)
        assert len({invalid, first, second}) == 3


def test_fields_belong_to_the_enclosing_blocks():
    with context.bound(request_id="request-1", user=None) as outer:
        with context.bound(job=7, run="job-7-1"):
            assert context.fields() == {"request_id": "request-1", "job": 7, "run": "job-7-1"}
            context.add(cluster="default")
        context.add(user=3)
        assert context.fields() == {"request_id": "request-1", "user": 3}
    assert outer["user"] == 3
    context.add(user=4)
    assert context.fields() == {}


def test_a_function_binds_fields_from_its_arguments():
    @context.with_fields(lambda number, **_: {"job": number})
    def look(number, *, deep=False):
        return deep, context.fields()

    assert look(4, deep=True) == (True, {"job": 4})
    assert context.fields() == {}


def test_a_message_carries_the_fields_of_the_request_only_and_forged_fields_are_dropped():
    with context.bound(request_id="request-1", user=3, job=7):
        assert context.task_fields() == {"request_id": "request-1", "user": 3}
    forged = {"request_id": 'x"\n{}', "user": 3, "organization": ["a"], "job": 9}
    assert context.fields_from_header(forged) == {"user": 3}
    assert context.fields_from_header("nonsense") == {}
