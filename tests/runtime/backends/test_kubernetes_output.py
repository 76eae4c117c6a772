from collections.abc import Iterator

import pytest

from runtime.backends.kubernetes_output import lines_chunk, of_rank, text_chunk

OUTPUT = b"0\tone\n1\tother\n0+\ttwo and \n0\tmore\n10\tnot mine\nno rank at all\n0\t\n0\tthree"
MINE = b"one\ntwo and more\n\n"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_ranks_lines_are_found_among_the_pods(size: int) -> None:
    pieces = [OUTPUT[at : at + size] for at in range(0, len(OUTPUT), size)]
    assert of_rank(pieces, 0, 0, 1000) == (MINE, True)
    assert of_rank(pieces, 1, 0, 1000) == (b"other\n", True)
    assert of_rank(pieces, 2, 0, 1000) == (b"", True)


@pytest.mark.parametrize("offset", range(len(MINE) + 2))
@pytest.mark.parametrize("limit", [1, 3, 100])
def test_an_offset_means_the_same_byte_whatever_the_limit(offset: int, limit: int) -> None:
    data, whole = of_rank([OUTPUT], 0, offset, limit)
    assert data == MINE[offset : offset + limit]
    assert whole == (offset + limit >= len(MINE))


def test_no_more_is_read_than_it_takes() -> None:
    read = []

    def pieces() -> Iterator[bytes]:
        for number in range(1000):
            read.append(number)
            yield b"0\t0123456789\n"

    assert of_rank(pieces(), 0, 0, 20) == (b"0123456789\n012345678", False)
    assert len(read) < 5


def test_a_character_that_is_cut_is_read_again_whole() -> None:
    data = "aü".encode()
    assert text_chunk(data[:2], 5, final=False).next_offset == 6
    assert text_chunk(data, 5, final=True).text == "aü"
    assert text_chunk(data[:2], 5, final=True).text == "a\N{REPLACEMENT CHARACTER}"


def test_only_whole_lines_are_samples() -> None:
    chunk = lines_chunk(b'{"a":1}\n{"a"', 3, final=False)
    assert (chunk.text, chunk.next_offset, chunk.eof) == ('{"a":1}\n', 11, False)
