"""Select one rank's output, and its times, from a Pod's output."""

import itertools

from runtime.backends.kubernetes.logs import extract_rank

OUTPUT = b"0\tone\n1\tother\n0+\ttwo and \n0\tmore\n10\tnot mine\nno rank at all\n0\t\n0\tthree"
"""A Pod's output. Each line begins with its rank. "0+": the rank's next line continues this one. The last line is
unfinished, so it is left out."""
RANK_0_OUTPUT = b"one\ntwo and more\n\n"


def test_extract_rank_selects_one_ranks_lines():
    for size in (1, 7, 1000):
        chunks = [OUTPUT[at : at + size] for at in range(0, len(OUTPUT), size)]
        found = [extract_rank(chunks, rank, 0, 1000)[0] for rank in range(3)]
        assert found == [RANK_0_OUTPUT, b"other\n", b""], f"in pieces of {size} bytes"


def test_extract_rank_honors_offset_and_limit():
    for offset, limit in itertools.product(range(len(RANK_0_OUTPUT) + 2), (1, 3, 100)):
        expected = RANK_0_OUTPUT[offset : offset + limit], offset + limit >= len(RANK_0_OUTPUT), []
        assert extract_rank([OUTPUT], 0, offset, limit) == expected


def test_extract_rank_stops_reading_at_the_limit():
    read = []

    def chunks():
        for number in range(1000):
            read.append(number)
            yield b"0\t0123456789\n"

    assert extract_rank(chunks(), 0, 0, 20) == (b"0123456789\n012345678", False, [])
    assert len(read) < 5


def test_extract_rank_finds_the_times_of_its_bytes():
    # 2 January 1970 begins at the Unix time 86400.
    stamps = ["00:00:00.123456789Z", "00:00:00.2Z", "00:00:05Z", "00:00:05.01Z", "02:00:06+02:00", "not-a-time"]
    lines = ["0\tone", "1\tother", "0+\ttwo ", "0\tmore", "0\tlast", "0\tdamaged"]
    output = "".join(f"1970-01-02T{stamp} {line}\n" for stamp, line in zip(stamps, lines, strict=True)).encode()
    data, _at_end, times = extract_rank([output], 0, 0, 1000, with_times=True)
    assert data == b"one\ntwo more\nlast\ndamaged\n"
    # The time of "more" is left out, because it is less than 0.1 s after the last one returned.
    assert times == [(0, 86400.123456), (4, 86405.0), (13, 86406.0)]
    # The byte at 9 is the second of "more", so the first time is that of "more", which begins at 8.
    assert extract_rank([output], 0, 9, 6, with_times=True) == (b"ore\nla", False, [(8, 86405.01), (13, 86406.0)])
