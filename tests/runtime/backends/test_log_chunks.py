"""Convert bytes of ranks' logs and nodes' samples to LogChunks."""

import io

import pytest

from runtime.backends.log_chunks import RawChunk, lines_chunk, read_raw_chunk, text_chunk


def test_text_chunk_leaves_an_incomplete_character_to_the_next_chunk():
    data = "aü".encode()
    assert text_chunk(RawChunk(data[:2], at_end=True, offset=5), is_final=False).next_offset == 6
    assert text_chunk(RawChunk(data, at_end=True, offset=5), is_final=True).text == "aü"
    assert text_chunk(RawChunk(data[:2], at_end=True, offset=5), is_final=True).text == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("offset", "text", "start"),
    [
        (0, "ü one\ntwo\n", 0),
        (1, "two\n", 7),
        (-4, "two\n", 7),  # the last four bytes
        (-3, "wo\n", 8),  # no line begins in the window, so the end of the last one is returned
        (-99, "ü one\ntwo\n", 0),
        (50, "", 50),
    ],
)
def test_a_window_begins_with_a_whole_line_if_it_has_one(offset, text, start):
    raw_chunk = read_raw_chunk(io.BytesIO("ü one\ntwo\n".encode()), offset, 99)
    chunk = text_chunk(raw_chunk, is_final=True, at_line=True)
    assert (chunk.text, chunk.offset, chunk.size) == (text, start, 11)


def test_lines_chunk_returns_complete_lines_only():
    chunk = lines_chunk(b'{"a":1}\n{"a"', 3, is_final=False)
    assert (chunk.text, chunk.next_offset, chunk.eof) == ('{"a":1}\n', 11, False)
