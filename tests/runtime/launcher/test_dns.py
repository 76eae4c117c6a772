"""How a launcher resolves the names of other nodes."""

import socket
import time

import pytest

from runtime.launcher import dns as dns_module
from runtime.launcher.dns import qualify_name, resolve, watch_address


def test_a_name_is_resolved_repeatedly_and_each_new_address_reported(monkeypatch):
    answers = [None, None, "10.0.0.1", "10.0.0.1", None, "10.0.0.2", *["10.0.0.2"] * 20]
    pauses = []
    reported = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == len(answers):
            raise KeyboardInterrupt  # `watch_address` never returns

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        watch_address("name", reported.append, lambda _name: answers[len(pauses)])
    assert reported == ["10.0.0.1", "10.0.0.2"], "DNS may return an earlier pod's address first"
    assert pauses[0] < pauses[-1], "later lookups are rarer"


def test_a_name_resolves_to_its_ipv4_address_if_it_has_one(monkeypatch):
    # The second name is too long for DNS: getaddrinfo raises another error.
    assert [resolve(name) for name in ("no-such-name.invalid", "a" * 70 + ".invalid")] == [None, None]
    answers = [(socket.AF_INET6, 1, 6, "", ("fd00::1", 0, 0, 0)), (socket.AF_INET, 1, 6, "", ("10.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_options: list(answers))
    assert resolve("name") == "10.0.0.1"
    answers.pop()
    assert resolve("name") == "fd00::1"


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        (
            "search runs.svc.cluster.local svc.cluster.local cluster.local example.com\noptions ndots:5\n",
            "job-1-1-0.job-1-1.runs.svc.cluster.local.",
        ),
        ("nameserver 10.96.0.10\nsearch runs.svc.k8s.example.com.\n", "job-1-1-0.job-1-1.runs.svc.k8s.example.com."),
        ("search example.com\nnameserver 10.0.0.1\n", "job-1-1-0.job-1-1"),
        ("", "job-1-1-0.job-1-1"),
    ],
)
def test_pod_names_are_resolved_inside_the_cluster_only(written, asked, tmp_path, monkeypatch):
    monkeypatch.setattr(dns_module, "_RESOLVER_CONFIG", str(tmp_path / "resolv.conf"))
    assert qualify_name("job-1-1-0.job-1-1") == "job-1-1-0.job-1-1", "without that file, the name stays"
    (tmp_path / "resolv.conf").write_text(written)
    assert qualify_name("job-1-1-0.job-1-1") == asked
