import io

import pytest

from runtime.backends.kubernetes.logs import extract_rank
from runtime.backends.log_chunks import RawChunk, lines_chunk, read_raw_chunk, text_chunk

OUTPUT = b"0\tone\n1\tother\n0+\ttwo and \n0\tmore\n10\tnot mine\nno rank at all\n0\t\n0\tthree"
RANK_0_OUTPUT = b"one\ntwo and more\n\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_extract_rank_selects_one_ranks_lines(size):
    chunks = [OUTPUT[at : at + size] for at in range(0, len(OUTPUT), size)]
    assert extract_rank(chunks, 0, 0, 1000) == (RANK_0_OUTPUT, True, [])
    assert extract_rank(chunks, 1, 0, 1000) == (b"other\n", True, [])
    assert extract_rank(chunks, 2, 0, 1000) == (b"", True, [])


@pytest.mark.parametrize("offset", range(len(RANK_0_OUTPUT) + 2))
@pytest.mark.parametrize("limit", [1, 3, 100])
def test_extract_rank_honors_offset_and_limit(offset, limit):
    data, is_all, _times = extract_rank([OUTPUT], 0, offset, limit)
    assert data == RANK_0_OUTPUT[offset : offset + limit]
    assert is_all == (offset + limit >= len(RANK_0_OUTPUT))


def test_extract_rank_stops_reading_at_the_limit():
    read = []

    def chunks():
        for number in range(1000):
            read.append(number)
            yield b"0\t0123456789\n"

    assert extract_rank(chunks(), 0, 0, 20) == (b"0123456789\n012345678", False, [])
    assert len(read) < 5


def test_extract_rank_finds_the_times_of_its_bytes():
    stamps = ["00:00:00.123456789Z", "00:00:00.2Z", "00:00:05Z", "00:00:05.01Z", "02:00:06+02:00", "not-a-time"]
    lines = ["0\tone", "1\tother", "0+\ttwo ", "0\tmore", "0\tlast", "0\tdamaged"]
    output = "".join(f"1970-01-02T{stamp} {line}\n" for stamp, line in zip(stamps, lines, strict=True)).encode()
    data, _at_end, times = extract_rank([output], 0, 0, 1000, with_times=True)
    assert data == b"one\ntwo more\nlast\ndamaged\n"
    assert times == [(0, 86400.123456), (4, 86405.0), (13, 86406.0)]
    assert extract_rank([output], 0, 9, 6, with_times=True) == (b"ore\nla", False, [(8, 86405.01), (13, 86406.0)])


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
        (-4, "two\n", 7),
        (-3, "wo\n", 8),
        (-99, "ü one\ntwo\n", 0),
        (50, "", 50),
    ],
)
def test_a_window_begins_with_a_whole_line(offset, text, start):
    raw_chunk = read_raw_chunk(io.BytesIO("ü one\ntwo\n".encode()), offset, 99)
    chunk = text_chunk(raw_chunk, is_final=True, at_line=True)
    assert (chunk.text, chunk.offset, chunk.size) == (text, start, 11)


def test_lines_chunk_returns_complete_lines_only():
    chunk = lines_chunk(b'{"a":1}\n{"a"', 3, is_final=False)
    assert (chunk.text, chunk.next_offset, chunk.eof) == ('{"a":1}\n', 11, False)
