"""Train a small convolutional network on digits in MNIST's file format with PyTorch DDP, on any number of nodes.

The script reads everything from Trainyard's environment contract, and nothing from the command line. DATASETS_PATH and
DATASETS name the data. EPOCHS, LR and BATCH_SIZE are the settings. BACKEND and `env://` set up the collectives.
The script

- scales the learning rate with the number of processes, and warms it up over the first epoch;
- reads only this rank's share of the images, in a worker process that prefetches the next batches;
- evaluates on all ranks and reduces the result, so that every test image counts once;
- writes a checkpoint after each epoch, and resumes from it in a later attempt;
- on SIGTERM writes a checkpoint in the middle of the epoch, and exits with code 143.

Order: a dataset from make_digits.py, learning rate 0.02, batch size 32, 1 node or more, 1 process or more.
"""

import atexit
import itertools
import json
import multiprocessing
import os
import signal
import struct
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = int(os.environ["EPOCHS"])
LEARNING_RATE = float(os.environ["LR"])
BATCH_SIZE = int(os.environ["BATCH_SIZE"])
CHECKPOINT = Path(os.environ["CHECKPOINT_DIR"]) / "mnist.pt"
OUTPUT = Path(os.environ["OUTPUT_DIR"]) / "model.pt"
"""The trained model."""
STOP_CHECK_STEPS = 4
"""Steps between two small all-reduces by which the ranks find out whether any rank has received SIGTERM.

An all-reduce after each step would slow the training down. A few steps take much less than the grace period (10
seconds).
"""


def read_idx(path):
    """Return the array in a file of MNIST's idx format: a magic number, the sizes of the dimensions, bytes."""
    data = path.read_bytes()
    dimensions = data[3]  # the last byte of the magic number
    sizes = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    return torch.frombuffer(bytearray(data[4 + 4 * dimensions :]), dtype=torch.uint8).reshape(sizes)


def read_digits(part):
    """Return the images, with a channel dimension and values around 0, and their labels."""
    folder = Path(os.environ["DATASETS_PATH"]) / os.environ["DATASETS"].split(",")[0] / "MNIST" / "raw"
    images = read_idx(folder / f"{part}-images-idx3-ubyte").float().unsqueeze(1) / 255
    images = (images - 0.15) / 0.3  # about the mean and the standard deviation of the pixels
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte").long()
    return TensorDataset(images, labels)


def create_loader(data):
    """Return a loader of this rank's batches, a few of which a worker process prefetches, and its sampler."""
    sampler = DistributedSampler(data, seed=7)
    loader = DataLoader(
        data,
        BATCH_SIZE,
        sampler=sampler,
        num_workers=1,
        prefetch_factor=4,
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
        # On SIGTERM the rank first writes its checkpoint, and needs its worker until then.
        worker_init_fn=lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    )
    atexit.register(kill_workers)
    return loader, sampler


def kill_workers():
    """Kill the loader's workers. Python would end them by SIGTERM, which they ignore, and wait for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error for a killed worker
    for worker in multiprocessing.active_children():
        worker.kill()


class Digits(nn.Module):
    """Two convolutions and a linear layer; works for any image size from 8x8 up.

    Group normalization keeps it stable at the learning rates of many processes, and needs no communication.
    """

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
        )
        self.classify = nn.Linear(32 * 16, 10)

    def forward(self, images):
        """Return the scores of the classes."""
        return self.classify(self.features(images).flatten(1))


def learning_rate(step, steps_in_epoch):
    """Return the ordered learning rate times the number of processes, with a linear warm-up over the first epoch."""
    return LEARNING_RATE * (1 + (dist.get_world_size() - 1) * min(1, step / steps_in_epoch))


def sum_over_ranks(device, *values):
    """Return each value summed over all ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def evaluate(model, data, device):
    """Return accuracy and mean loss on the test set. Each rank evaluates its share of the images."""
    model.eval()
    share = range(dist.get_rank(), len(data), dist.get_world_size())
    images, labels = data[list(share)]
    with torch.no_grad():
        output = model(images.to(device))
        loss = nn.functional.cross_entropy(output, labels.to(device), reduction="sum")
    correct = (output.argmax(1) == labels.to(device)).sum()
    correct, loss, count = sum_over_ranks(device, correct.item(), loss.item(), len(labels))
    return correct / count, loss / count


def save(state, path=CHECKPOINT):
    """On rank 0, replace a file atomically, since the run may be killed at any moment."""
    if dist.get_rank() == 0:
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(path)


def report_epoch(epoch, step, **values):
    """On rank 0, print a line and append it to METRICS_FILE, from which the console draws curves."""
    if dist.get_rank() == 0:
        text = " ".join(f"{name} {value:.4f}" for name, value in values.items())
        print(f"epoch {epoch}/{EPOCHS} step {step} {text}", flush=True)
        line = {"epoch": epoch, "epochs": EPOCHS, "step": step, **values, "time": time.time()}
        with Path(os.environ["METRICS_FILE"]).open("a") as file:
            file.write(json.dumps(line) + "\n")


def start():
    """Join the other ranks; return the device, and a list that is not empty once this rank has received SIGTERM."""
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *_: stop_signals.append(True))
    device = torch.device("cpu")
    if os.environ["BACKEND"] == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(os.environ["BACKEND"])
    torch.manual_seed(7)
    return device, stop_signals


def main():
    """Train, evaluate after each epoch, and report."""
    device, stop_signals = start()
    loader, sampler = create_loader(read_digits("train"))
    test = read_digits("t10k")
    model = Digits().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    # Progress within an epoch is counted in images, since a later attempt may have batches of another size.
    total_batch_size = BATCH_SIZE * dist.get_world_size()
    epochs_done, images_done, step = 0, 0, 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epochs_done, images_done, step = state["epochs_done"], state["images_done"], state["step"]
        if dist.get_rank() == 0:
            print(
                f"resumed after epoch {epochs_done}, image {images_done}; restart {os.environ['RESTART_COUNT']}",
                flush=True,
            )
    ddp_model = DistributedDataParallel(model)

    def must_stop():
        # All ranks must agree to stop, or the others would wait for those that have stopped.
        return sum_over_ranks(device, len(stop_signals))[0] > 0

    accuracy, loss = evaluate(model, test, device)
    first_loss, is_stopping = loss, False
    for epoch in range(epochs_done + 1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        model.train()
        losses = []
        batches_done = images_done // total_batch_size
        for batch, (images, labels) in enumerate(itertools.islice(loader, batches_done, None), batches_done + 1):
            optimizer.param_groups[0]["lr"] = learning_rate(step, len(loader))
            optimizer.zero_grad()
            output = ddp_model(images.to(device, non_blocking=True))
            batch_loss = nn.functional.cross_entropy(output, labels.to(device, non_blocking=True))
            batch_loss.backward()
            optimizer.step()
            step += 1
            losses.append(batch_loss.detach())
            # No check after the last batch: the epoch is finished and saved below. A checkpoint here would leave a
            # later attempt an epoch with no batch left.
            if batch % STOP_CHECK_STEPS == 0 and batch < len(loader) and must_stop():
                is_stopping, images_done = True, batch * total_batch_size
                break
        if not is_stopping:
            epochs_done, images_done = epoch, 0
        progress = {"epochs_done": epochs_done, "images_done": images_done, "step": step}
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **progress})
        if is_stopping:
            break
        accuracy, loss = evaluate(model, test, device)
        (train_loss,) = sum_over_ranks(device, torch.stack(losses).mean().item() / dist.get_world_size())
        report_epoch(epoch, step, loss=train_loss, accuracy=accuracy)
        # Check after each epoch too, because an epoch may have too few batches for a check within it.
        if epoch < EPOCHS and must_stop():
            is_stopping = True
            break
    if not is_stopping:
        save(model.state_dict(), OUTPUT)
    if dist.get_rank() == 0:
        print(f"result: test accuracy {accuracy:.4f}, loss {first_loss:.2f} -> {loss:.2f}", flush=True)
        if is_stopping:
            print(f"stopped by SIGTERM: saved after epoch {epochs_done}, image {images_done}", flush=True)
    dist.destroy_process_group()
    if is_stopping:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
