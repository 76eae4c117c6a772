"""The filter of calls: read here as the kernel would run it."""

from __future__ import annotations

import errno
import struct

import pytest

from runtime.launcher import calls

ALLOWED = "allowed"
WORDS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def ask(machine: str, number: int, *arguments: int, word: int | None = None) -> str:
    """What the program says to one call: `allowed`, or the name of the error."""
    program = calls.program(machine)
    assert program is not None
    lines = list(struct.iter_unpack("<HBBI", program))
    six = (*arguments, *[0] * 6)[:6]
    data = struct.pack("<iIQ6Q", number, WORDS[machine] if word is None else word, 0, *six)
    value, at = 0, 0
    while True:
        code, yes, no, operand = lines[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:
            return ALLOWED if operand == 0x7FFF0000 else errno.errorcode[operand & 0xFFFF]
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += yes if holds else no


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 1), ("aarch64", 2)])
def test_every_call_of_the_list_is_refused_and_no_other(machine: str, column: int) -> None:
    refused = {line[column]: errno.errorcode[line[3]] for line in calls._NAMES if line[column]}
    assert len(refused) > 30
    for number in range(600):
        assert ask(machine, number) == refused.get(number, ALLOWED), number


@pytest.mark.parametrize(("machine", "fcntl", "clone", "unshare"), [("x86_64", 72, 56, 272), ("aarch64", 25, 220, 97)])
def test_calls_are_refused_for_what_they_are_asked(machine: str, fcntl: int, clone: int, unshare: int) -> None:
    assert ask(machine, fcntl, 3, 1024) == "EPERM"
    assert ask(machine, fcntl, 3, 1024 | 1 << 32) == "EPERM", "the kernel looks at 32 bits of it"
    assert {ask(machine, fcntl, 3, command) for command in (0, 1, 2, 3, 4, 1025, 1030, 1031)} == {ALLOWED}
    for call in (clone, unshare):
        assert ask(machine, call, 0x10000000 | 17) == "EPERM"
        assert ask(machine, call, 0x00020000 | 17) == ALLOWED


def test_the_calls_of_other_machines_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("x86_64", 39, word=0x40000003) == "ENOSYS", "32 bits"
    assert ask("x86_64", 39 | 0x40000000) == "ENOSYS", "x32"
    assert calls.program("riscv64") is None
    assert calls.why_not() == ""
    monkeypatch.setattr(calls, "program", lambda: None)
    assert "is not known" in calls.why_not()
