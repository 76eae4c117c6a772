from __future__ import annotations

import os
import select
import signal
import socket
import time
from pathlib import Path

import pytest

from runtime.launcher import names as names_module
from runtime.launcher.names import Names, look_up, resolve, whole


def test_names_are_asked_for_until_all_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    asked: list[str] = []

    def ask(name: str) -> str | None:
        asked.append(name)
        return f"10.0.0.{name}" if len(pauses) >= int(name) * 15 else None

    assert resolve(["0", "1", "2"], {0: "10.9.9.9"}, ask) == ["10.9.9.9", "10.0.0.1", "10.0.0.2"]
    assert "0" not in asked, "its own address is known"
    assert asked.count("1") == 16, "who has answered is not asked again"
    assert pauses[0] < pauses[-1], "with time it asks less often"


def test_a_name_that_nobody_knows_has_no_address() -> None:
    assert look_up("no-such-name.invalid") is None
    assert look_up("a" * 70 + ".invalid") is None
    assert look_up("127.0.0.1") == "127.0.0.1"


def test_ipv4_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        (socket.AF_INET6, 1, 6, "", ("fd00::1", 0, 0, 0)),
        (socket.AF_INET, 1, 6, "", ("10.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_options: list(answers))
    assert look_up("name") == "10.0.0.1"
    answers.pop()
    assert look_up("name") == "fd00::1"


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
def test_the_worlds_servers_are_not_asked_for_a_pods_name(
    written: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_module, "_RESOLVER", str(tmp_path / "resolv.conf"))
    assert whole("job-1-1-0.job-1-1") == "job-1-1-0.job-1-1"
    (tmp_path / "resolv.conf").write_text(written)
    assert whole("job-1-1-0.job-1-1") == asked


def test_the_addresses_come_through_the_pipe() -> None:
    names = Names(["127.0.0.1", "not asked"], {1: "10.0.0.2"})
    found = None
    while found is None:
        assert select.select([names], [], [], 10)[0]
        found = names.read()
    names.close()
    os.waitpid(names.pid, 0)
    assert found == ["127.0.0.1", "10.0.0.2"]


def test_a_resolver_that_ends_without_a_word_is_told() -> None:
    names = Names(["no-such-name.invalid"], {})
    os.kill(names.pid, signal.SIGKILL)
    assert select.select([names], [], [], 10)[0]
    with pytest.raises(OSError, match="has ended"):
        names.read()
    os.waitpid(names.pid, 0)
    os.close(names.fileno())
