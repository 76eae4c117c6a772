"""Retries that were bought, through the whole console: the back-off, the checkpoint, the receipt."""

from __future__ import annotations

from datetime import datetime

import pytest

from tests.flows.console import Buyer, Console

pytestmark = pytest.mark.flow

BACKOFF_SECONDS = 3
SOURCE = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(os.environ["CHECKPOINT_DIR"]), os.environ["RANK"]
first = os.environ["RESTART_COUNT"] == "0"
done = int((folder / "epoch").read_text()) if (folder / "epoch").exists() else 0
print("attempt", os.environ["RESTART_COUNT"], "after epoch", done, flush=True)
for epoch in range(done + 1, int(os.environ["EPOCHS"]) + 1):
    if first and epoch == 2:
        if rank == "1":
            while not (folder / "epoch").exists(): time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGSEGV)
        signal.pause()
    time.sleep(0.5)
    print(f"epoch {epoch}/3 loss {1 / epoch}", flush=True)
    if rank == "0":
        (folder / "saving").write_text(str(epoch))
        (folder / "saving").replace(folder / "epoch")
"""


def seconds(begin: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


def test_a_crash_is_tried_again_from_the_checkpoint_after_its_back_off(console: Console, buyer: Buyer) -> None:
    buyer.call("PUT", "workspaces/main/files/crashes.py", content=SOURCE.encode())
    job = buyer.start(
        "crashes", code_path="crashes.py", epochs=3, retries=1, retry_backoff_seconds=BACKOFF_SECONDS
    )  # fmt: skip
    waits = buyer.until(job, lambda data: "It waits until" in data["waiting_for"])
    assert waits["state"] == "queued"
    ended = buyer.ended(job)
    assert (ended["state"], ended["reason"]) == ("succeeded", "completed")
    first, second = buyer.job(job)["attempts"]
    assert [first["reason"], second["reason"]] == ["code_failed", "completed"]
    assert (first["failure"]["rank"], first["failure"]["node"], first["failure"]["signal"]) == (1, 1, "SIGSEGV")
    assert seconds(first["finished_at"], second["claimed_at"]) >= BACKOFF_SECONDS
    assert buyer.log(job) == "attempt 0 after epoch 0\nepoch 1/3 loss 1.0\n"
    assert (
        buyer.log(job, attempt=2) == "attempt 1 after epoch 1\nepoch 2/3 loss 0.5\nepoch 3/3 loss 0.3333333333333333\n"
    )
    # Every attempt is paid for its own time, and the wait between them is not.
    bill = buyer.call("GET", f"jobs/{job}/receipt/")
    used = [float(line["quantity"]) * 3600 / 2 for line in bill["lines"] if line["rule"] == "time_used"]
    ran = [seconds(each["started_at"], each["finished_at"]) for each in (first, second)]
    assert used == pytest.approx(ran, abs=0.01)
    assert 0 < bill["total_minor"] <= ended["ceiling_minor"]
    assert buyer.call("GET", "wallet/")["held_minor"] == 0
    assert first["lost_seconds"] < ran[0], "what came before the checkpoint is not lost"
    assert console.supervisors() == []
