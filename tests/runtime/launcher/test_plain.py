from __future__ import annotations

import json
import math
import typing
from pathlib import Path
from typing import Any

import pytest

from runtime.launcher import plain
from runtime.launcher.plain import dumps, loads

LAUNCHER = Path(plain.__file__).parent
TOLD: list[Any] = [
    {},
    [],
    "",
    'a " quote, a \\ and \u00e9 \u4f60 \U0001f600 \x00 \x1f \ud800',
    {"a": {"b": [1, -2, 3.5, 1e300, 10**30, True, False, None]}, "": [[]], "n": {"pids": {"3": 0}}},
    (1, 2),
    math.inf,
]


@pytest.mark.parametrize("value", TOLD, ids=range(len(TOLD)))
def test_json_is_written_and_read_as_by_the_public_module(value: Any) -> None:
    assert dumps(value) == json.dumps(value)
    assert loads(json.dumps(value)) == json.loads(json.dumps(value))
    assert loads(f"\r\n {json.dumps(value, indent=2)} \t".encode()) == json.loads(json.dumps(value))


def test_keys_are_written_as_by_the_public_module() -> None:
    assert dumps({1: 2, None: 3, False: 4}) == json.dumps({1: 2, None: 3, False: 4})


@pytest.mark.parametrize(
    "text", ["", " ", "{", '{"a": 1', "[1,]", "{'a': 1}", "1 2", '"a', '"\x01"', "nul", b"\xff", b'"\xc3"']
)
def test_what_is_not_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of any kind
        json.loads(text)
    with pytest.raises(ValueError):  # noqa: PT011 - as the public module
        loads(text)


@pytest.mark.parametrize("text", ["[" * 4000, '{"a":' * 4000, "[" * 100_000])
def test_what_is_nested_too_deep_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="deep"):
        loads(text)


def test_not_a_number_stays_one() -> None:
    assert math.isnan(loads(dumps(math.nan)))
    assert loads("-Infinity") == -math.inf


def test_what_json_has_no_word_for_is_refused() -> None:
    with pytest.raises(TypeError):
        dumps({"a": object()})


class Public(typing.NamedTuple):
    first: int
    second: str = "two"

    def both(self) -> str:
        return f"{self.first}{self.second}"


def _ours() -> Any:
    class Ours(plain.NamedTuple):
        first: int
        second: str = "two"

        def both(self) -> str:
            return f"{self.first}{self.second}"

    return Ours


def test_a_named_tuple_behaves_as_the_public_one() -> None:
    ours = _ours()
    for kind in (Public, ours):
        row = kind(1)
        assert row == (1, "two") == kind(first=1) == kind(*(1, "two"))
        assert row.both() == "1two"
        assert kind._fields == ("first", "second")
        assert row._replace(second="three") == (1, "three")
        assert row._asdict() == {"first": 1, "second": "two"}
        assert isinstance(row, tuple)
        first, second = row
        assert (first, second) == (row.first, row.second)
        for wrong in ((), (1, "2", 3)):
            with pytest.raises(TypeError):
                kind(*wrong)
        for named in ({"third": 3}, {"second": "2"}):
            with pytest.raises(TypeError):
                kind(**named)
        with pytest.raises(TypeError):
            kind(1, first=2)
        with pytest.raises(AttributeError):
            row.first = 2
    assert repr(ours(1)) == repr(Public(1)).replace("Public", "Ours")
