"""Windows of logs of any size, and the search in logs."""

import pytest

from console.core.errors import NotFound
from jobs import selectors
from runtime.backends import log_chunks
from runtime.specs import Outcome

GIB = 1 << 30
TEXT_AT = 3 * (GIB >> 2)
"""Offset of some lines of text among the zeros."""


@pytest.fixture
def huge(customer, backend, tmp_path, monkeypatch):
    """The path of the API for a log of 1 GiB, which is sparse on the disk; zeros have no line ends."""
    path = tmp_path / "rank-0.log"
    with path.open("wb") as file:
        file.write(b"first line\n")
        file.seek(TEXT_AT)
        file.write("\nüber\nKeyError: 'epoch'\nmore\n".encode())
        file.seek(GIB - 30)
        file.write(b"\nepoch 9/9\nthe last line\n")
        file.truncate(GIB)
    assert path.stat().st_blocks < 1000

    def logs(_name, _rank, offset=0, limit=65536, *, at_line=False, with_times=False):
        with path.open("rb") as stream:
            return log_chunks.text_chunk(
                log_chunks.read_raw_chunk(stream, offset, limit), is_final=False, at_line=at_line
            )

    monkeypatch.setattr(backend, "logs", logs)
    return f"/api/v1/jobs/{customer.started(workers_per_node=1).job_id}/logs/"


def test_only_the_window_is_read_from_a_log_of_a_gibibyte(api, customer, huge):
    get = api(customer.membership).get
    end = get(huge, {"tail": 64}).json()
    assert (end["text"].rstrip("\0"), end["size"]) == ("epoch 9/9\nthe last line\n", GIB)
    assert end["offset"] + len(end["text"]) == end["next_offset"] == GIB
    # Earlier windows end where the later one begins, and no byte is in both.
    around = get(huge, {"offset": TEXT_AT - 10, "limit": 30, "whole_lines": 1}).json()
    assert (around["offset"], around["text"][:6]) == (TEXT_AT + 1, "über\nK")
    before = get(huge, {"offset": TEXT_AT - 9, "limit": 10, "whole_lines": 1}).json()
    assert before["next_offset"] == around["offset"]
    assert len(get(huge, {"limit": 1 << 40}).json()["text"]) == 1 << 20  # never more than 1 MiB
    assert get(huge, {"offset": GIB + 5}).json()["text"] == ""


def test_a_search_finds_a_text_and_the_first_error_piece_by_piece(api, customer, huge):
    get = api(customer.membership).get

    def find(query, offset):
        match, requests = {"offset": None, "eof": False, "next_offset": offset}, 0
        while match["offset"] is None and not match["eof"]:
            match = get(f"{huge}search/", {"q": query, "offset": match["next_offset"]}).json()
            requests += 1
        return match["offset"], requests

    start = TEXT_AT - (100 << 20)
    assert find("ÜBER", start) == (TEXT_AT + 1, 2), "a request searches 64 MiB"
    # An empty query finds the first error, here the "Error" of "KeyError".
    assert find("", start)[0] == TEXT_AT + len("\nüber\nKey".encode())
    assert find("first line", 0) == (0, 1)
    assert find("first line", GIB - (1 << 20)) == (None, 1)
    assert get(f"{huge}search/", {"q": "x" * 201}).status_code == 400


def test_times_are_returned_if_asked_for(api, customer, backend, monkeypatch):
    attempt = customer.started()
    first = backend.clock()
    monkeypatch.setattr(backend, "clock", lambda: first)
    backend.write(attempt.run_name, "one\ntwo ")
    monkeypatch.setattr(backend, "clock", lambda: first + 9)
    backend.write(attempt.run_name, "more\nthree\n")
    get = api(customer.membership).get
    path = f"/api/v1/jobs/{attempt.job_id}/logs/"
    assert "times" not in get(path).json()
    # Pairs: the line from which on a time applies, and this time. The second line began with the first write.
    assert get(path, {"timestamps": 1}).json()["times"] == [[0, first], [2, first + 9]]
    assert get(path, {"timestamps": "true", "offset": 6}).json()["times"] == [[0, first], [1, first + 9]]
    assert get(f"/api/v1/jobs/{customer.job().pk}/logs/", {"timestamps": 1}).json()["times"] == []


def test_a_search_finds_a_text_that_two_pieces_share_and_takes_no_patterns(customer, backend, monkeypatch):
    monkeypatch.setattr(selectors, "SEARCH_STEP_BYTES", 64)
    attempt = customer.started()
    backend.write(attempt.run_name, "ü" * 30 + "needle" + "x" * 300 + "\nTraceback (most recent call last):\n")
    assert selectors.search_log(attempt.job, rank=0, query="NEEDLE").offset == 60  # "ü" has two bytes
    assert selectors.search_log(attempt.job, 0, "").offset == 367  # the line of the traceback
    # A log of 402 bytes. The next search begins where ten more bytes would be a match with the first of them.
    missing = selectors.search_log(attempt.job, 0, "(?:(a+)+)$")
    assert missing == selectors.LogMatch(None, 393, eof=True)
    assert selectors.search_log(attempt.job, 0, "(?:(a+)+)$", missing.next_offset) == missing
    backend.write(attempt.run_name, "ne")
    missing = selectors.search_log(attempt.job, 0, "needle", 300)
    backend.write(attempt.run_name, "edle")
    assert selectors.search_log(attempt.job, 0, "needle", missing.next_offset).offset == 402
    backend.write(attempt.run_name, "训练")
    missing = selectors.search_log(attempt.job, 0, "needle", 407)
    backend.write(attempt.run_name, "needle")
    found = selectors.search_log(attempt.job, 0, "needle", missing.next_offset)
    assert found.offset == 414, "the search did not begin within a character"
    backend.end(attempt.run_name, Outcome.COMPLETED)
    assert selectors.search_log(attempt.job, 0, "missing") == selectors.LogMatch(None, 420, eof=True), "nothing follows"
    with pytest.raises(NotFound):
        selectors.search_log(attempt.job, 9, "x")
