"""The difference of two texts, line by line."""

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from storage import diffs
from storage.diffs import line_diff

LINES = st.lists(st.sampled_from(["a", "b", "", "def train():", "    pass"]), max_size=30)


def shown(old, new):
    """Return each line of a difference after its sign. "@" stands for lines that are left out."""
    return [line.sign + line.text for line in line_diff(old="\n".join(old), new="\n".join(new))]


def test_a_diff_shows_changes_with_their_context():
    old = [str(number) for number in range(20)]
    new = [*old[:6], "six", *old[7:18], *old[19:]]
    assert shown(old, new) == [
        "@", " 3", " 4", " 5", "-6", "+six", " 7", " 8", " 9", "@", " 15", " 16", " 17", "-18", " 19",
    ]  # fmt: skip
    assert shown(old, old) == []
    assert shown([], ["a"]) == ["+a"]


@given(LINES, LINES)
def test_without_gaps_a_diff_holds_both_texts(old, new):
    old_text, new_text = "".join(f"{line}\n" for line in old), "".join(f"{line}\n" for line in new)
    lines = line_diff(old=old_text, new=new_text)
    if old != new and not any(line.sign == "@" for line in lines):
        assert [line.text for line in lines if line.sign in " -"] == old
        assert [line.text for line in lines if line.sign in " +"] == new


def test_a_long_difference_is_one_change():
    count = diffs.MATCH_LIMIT + 1
    old, new = [f"a{number % 7}" for number in range(count)], [f"b{number % 5}" for number in range(count)]
    lines = shown(["same"] * 9 + old + ["same"] * 9, ["same"] * 9 + new + ["same"] * 9)
    assert [(sign, len(list(group))) for sign, group in groupby(line[0] for line in lines)] == [
        ("@", 1), (" ", 3), ("-", count), ("+", count), (" ", 3), ("@", 1),
    ]  # fmt: skip
