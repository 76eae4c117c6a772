"""Cost of the platform while a run trains: a run compared with the same script started by hand.

make bench NAME=training (QUICK=1 for fewer rounds)

Training: two processes of a small convolutional network on CPU; steps per second after a warm-up, by the script's own
clock. In the run, the sandbox, the limits, the telemetry and hang detection are active. Log: one process that computes
and prints 1 GB; seconds from its first line to its last, compared with output to a plain file. The run and the script
started by hand have the same interpreter and flags, threads, data and network interface. Rounds are many and short,
because the difference is smaller than the variation between two rounds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.baselines import PlainLaunches
from bench.environment import images_root
from bench.local import LocalRuns
from bench.rounds import Variant, is_quick, measure, print_result, print_table, ratio, summaries

TRAINING = """\
import os, pathlib, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(),
    torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(32 * 12 * 12, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images, labels = torch.rand(32, 1, 28, 28), torch.randint(0, 10, (32,))
def step():
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()
for _ in range(20):
    step()
dist.barrier()
started_at = time.monotonic()
for number in range(STEPS):
    loss = step()
    if number % 50 == 0 and dist.get_rank() == 0:
        print(f"step {number} loss {loss:.4f}", flush=True)
dist.barrier()
if dist.get_rank() == 0:
    pathlib.Path(os.environ["RUN_DIR"], "result").write_text(repr(STEPS / (time.monotonic() - started_at)))
dist.destroy_process_group()
"""
# The script computes between the blocks, as a training does. Else only the copying of bytes would be measured.
# The sum of 40,000 squares takes some milliseconds for each block of 1,000 lines.
LOGGING = """\
import os, pathlib, sys, time
line = "step 1 loss 0.1234 " + "x" * 80 + "\\n"
block = line * 1000
started_at = time.monotonic()
written = 0
while written < LOG_BYTES:
    sum(number * number for number in range(40_000))
    sys.stdout.write(block)
    written += len(block)
sys.stdout.flush()
pathlib.Path(os.environ["RUN_DIR"], "result").write_text(repr(time.monotonic() - started_at))
"""


def main() -> None:
    """Measure, then print the tables and the JSON object."""
    rounds, steps, log_bytes = (6, 200, 1 << 28) if is_quick() else (12, 400, 1 << 30)
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as name:
        folder = Path(name)
        local, by_hand = LocalRuns(folder, images_root()), PlainLaunches(folder, images_root())
        training, logging = local.workspace / "training.py", local.workspace / "logging_much.py"
        training.write_text(f"STEPS = {steps}\n{TRAINING}")
        logging.write_text(f"LOG_BYTES = {log_bytes}\n{LOGGING}")

        def run_on_platform(script: Path, workers: int) -> float:
            result = float((local.run(script.name, nodes=1, workers=workers) / "result").read_text())
            local.delete_last()
            return result

        def train_by_hand() -> float:
            by_hand.processes(training, 2)
            return float((folder / "result").read_text())

        def log_by_hand() -> float:
            by_hand.one_process(logging)
            return float((folder / "result").read_text())

        speeds = measure(
            [
                Variant("training_inside", lambda: run_on_platform(training, 2)),
                Variant("training_by_hand", train_by_hand),
            ],
            rounds,
            "steps/s",
        )
        seconds = measure(
            [Variant("log_inside", lambda: run_on_platform(logging, 1)), Variant("log_by_hand", log_by_hand)],
            rounds,
            "s",
        )
    training_figures, log_figures = summaries(speeds), summaries(seconds)
    print_table("steps a second", training_figures)
    print_table(f"{log_bytes >> 20} MiB of log, s", log_figures)
    ratios = {
        "training_vs_by_hand": ratio(training_figures, "training_inside", "training_by_hand"),
        "log_vs_plain_file": ratio(log_figures, "log_inside", "log_by_hand"),
    }
    print(f"training_vs_by_hand: {ratios['training_vs_by_hand']} (goal: at least 0.99)")
    print(f"log_vs_plain_file: {ratios['log_vs_plain_file']} (goal: at most 1.02)")
    print_result("training", {**training_figures, **log_figures}, ratios)


if __name__ == "__main__":
    main()
