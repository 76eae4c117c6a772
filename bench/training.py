"""What the platform costs a run that is under way: training inside beside the same script started by hand.

make bench NAME=training (QUICK=1 for fewer rounds)

Training: two processes of a small convolutional network on CPU, steps a second after a warm-up, by the script's own
clock; inside, the sandbox, the limits, the telemetry and the hang watch are all at work. Log: one process that computes
and prints 1 GB, seconds from its first line to its last, beside the same with its output sent to a plain file. Both
ways have the same interpreter and flags, threads, data and network interface; rounds are many and short, because what
is looked for is smaller than what a machine does between two rounds.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bench.baselines import Bare
from bench.local import Local
from bench.rounds import Variant, conclude, is_quick, measure, ratio, summary, table

HOUSE = Path(__file__).resolve().parent.parent
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
begun = time.monotonic()
for number in range(STEPS):
    loss = step()
    if number % 50 == 0 and dist.get_rank() == 0:
        print(f"step {number} loss {loss:.4f}", flush=True)
dist.barrier()
if dist.get_rank() == 0:
    pathlib.Path(os.environ["RUN_DIR"], "figure").write_text(repr(STEPS / (time.monotonic() - begun)))
dist.destroy_process_group()
"""
LOGGING = """\
import os, pathlib, sys, time
line = "step 1 loss 0.1234 " + "x" * 80 + "\\n"
block = line * 1000
begun = time.monotonic()
written = 0
while written < LOG_BYTES:
    sum(number * number for number in range(40_000))
    sys.stdout.write(block)
    written += len(block)
sys.stdout.flush()
pathlib.Path(os.environ["RUN_DIR"], "figure").write_text(repr(time.monotonic() - begun))
"""


def main() -> None:
    """Measure, print the tables, and the JSON object last."""
    images_root = Path(os.environ.get("TRAINYARD_IMAGES_ROOT", HOUSE / "var" / "images")).resolve()
    rounds, steps, log_bytes = (6, 200, 1 << 28) if is_quick() else (12, 400, 1 << 30)
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as name:
        folder = Path(name)
        local, bare = Local(folder, images_root), Bare(folder, images_root)
        training, logging = local.workspace / "training.py", local.workspace / "logging_much.py"
        training.write_text(f"STEPS = {steps}\n{TRAINING}")
        logging.write_text(f"LOG_BYTES = {log_bytes}\n{LOGGING}")

        def inside(script: Path, workers: int) -> float:
            figure = float((local.run(script.name, 1, workers) / "figure").read_text())
            local.forget()
            return figure

        def by_hand(script: Path, workers: int) -> float:
            if workers == 1:
                bare.plain(script)
            else:
                bare.pair(script, workers)
            return float((folder / "figure").read_text())

        speeds = measure(
            [
                Variant("training_inside", lambda: inside(training, 2)),
                Variant("training_by_hand", lambda: by_hand(training, 2)),
            ],
            rounds,
            "steps/s",
        )
        seconds = measure(
            [
                Variant("log_inside", lambda: inside(logging, 1)),
                Variant("log_by_hand", lambda: by_hand(logging, 1)),
            ],
            rounds,
            "s",
        )
    trained = {name: summary(figures) for name, figures in speeds.items()}
    logged = {name: summary(figures) for name, figures in seconds.items()}
    table("steps a second", trained)
    table(f"{log_bytes >> 20} MiB of log, s", logged)
    ratios = {
        "training_vs_by_hand": ratio(trained, "training_inside", "training_by_hand"),
        "log_vs_plain_file": ratio(logged, "log_inside", "log_by_hand"),
    }
    print(f"training_vs_by_hand: {ratios['training_vs_by_hand']} (goal: at least 0.99)")
    print(f"log_vs_plain_file: {ratios['log_vs_plain_file']} (goal: at most 1.02)")
    conclude("training", {**trained, **logged}, ratios)


if __name__ == "__main__":
    main()
