"""Secrets in output and messages are replaced, also in pieces and in part."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.launcher.masking import Mask

LETTERS = st.text("ab\n", max_size=12)


@given(values=st.lists(LETTERS, max_size=4), parts=st.lists(st.one_of(LETTERS, st.integers(0, 3)), max_size=12))
def test_a_stream_in_pieces_contains_no_value(values, parts):
    """A number among the parts stands for a value. Texts of two letters overlap in every way."""
    pieces = [(values[part] if part < len(values) else "") if isinstance(part, int) else part for part in parts]
    mask = Mask(values)
    stream = mask.new_stream()
    whole = "".join(pieces).encode()
    if stream is None:  # there are no values, or only short ones
        assert mask.apply_to_bytes(whole) == whole
        return
    stored = b"".join([*(stream.feed(piece.encode()) for piece in pieces), stream.finish()])
    # Shorter values are kept, because they would match ordinary text.
    assert not [value for value in values if len(value) >= 6 and value.encode() in stored]
    assert stream.finish() == b""


def test_a_piece_waits_only_while_it_may_begin_a_value():
    stream = Mask(["hunter2hunter2"]).new_stream()
    assert [stream.feed(piece) for piece in (b"my hunt", b"er season\n", b"hunter2", b"hunter2!")] == [
        b"my ", b"hunter season\n", b"", b"***!",
    ]  # fmt: skip


def test_a_value_that_the_end_of_a_stream_cuts_is_replaced():
    """Unless fewer than six of its characters are left: these are likely to be ordinary text."""
    stream = Mask(["hunter2hunter2"]).new_stream()
    assert (stream.feed(b"my hunter2"), stream.finish()) == (b"my ", b"***")
    assert (stream.feed(b"my hunt"), stream.finish()) == (b"my ", b"hunt")


def test_values_of_several_lines_are_replaced_line_by_line():
    # "short" has fewer characters than a value needs. A value also counts without the spaces around it.
    mask = Mask(["-----BEGIN KEY-----\nMIIBVwIBADANBg\n-----END KEY-----\n", "short", "with spaces  "])
    assert mask.apply_to_text("a MIIBVwIBADANBg b\\n-----END KEY-----") == "a *** b\\n***"
    assert mask.apply_to_text("short with spaces") == "short ***"
    lines = ["with spaces  ", "no MIIBVwIBADANBg", 3, None]
    assert mask.apply_to_message({"with spaces": {"lines": lines}}) == {
        "with spaces": {"lines": ["***", "no ***", 3, None]}
    }, "names of fields stay"


def test_the_end_of_a_text_that_was_cut_is_replaced():
    """The same limit of six characters applies."""
    mask = Mask(["hunter2hunter2"])
    assert mask.apply_to_text("refused: hunter2hun") == "refused: ***"
    assert mask.apply_to_text("the hunt") == "the hunt"
