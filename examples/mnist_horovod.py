"""Train a small convolutional network on digits in MNIST's file format with Horovod and PyTorch.

The training is that of mnist_ddp.py, on any number of nodes. `hvd.init()` reads the environment, both with the Gloo
controller and with MPI. Nothing comes from the command line. The script

- scales the learning rate with the number of processes, and warms it up over the first epoch;
- reads only this rank's share of the images, in a worker process that prefetches the next batches;
- evaluates on all ranks and reduces the result, so that every test image counts once;
- writes a checkpoint after each epoch on rank 0, which broadcasts model, optimizer and progress in a later attempt;
- on SIGTERM writes a checkpoint in the middle of the epoch, and exits with code 143.

Order: the image `horovod`, a dataset from make_digits.py, learning rate 0.02, batch size 32, 1 node or more.
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

import horovod.torch as hvd
import torch
from torch import nn
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
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), seed=7)
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


def build_model():
    """Return two convolutions and a linear layer. Group normalization needs no communication between ranks."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def learning_rate(step, steps_in_epoch):
    """Return the ordered learning rate times the number of processes, with a linear warm-up over the first epoch."""
    return LEARNING_RATE * (1 + (hvd.size() - 1) * min(1, step / steps_in_epoch))


def sum_over_ranks(name, *values):
    """Return each value summed over all ranks. Horovod matches the calls of the ranks by their `name`."""
    return hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum, name=name).tolist()


def evaluate(model, data, device):
    """Return accuracy and mean loss on the test set. Each rank evaluates its share of the images."""
    model.eval()
    images, labels = data[list(range(hvd.rank(), len(data), hvd.size()))]
    with torch.no_grad():
        output = model(images.to(device))
        loss = nn.functional.cross_entropy(output, labels.to(device), reduction="sum")
    correct = (output.argmax(1) == labels.to(device)).sum()
    correct, loss, count = sum_over_ranks("evaluation", correct.item(), loss.item(), len(labels))
    return correct / count, loss / count


def save(state, path=CHECKPOINT):
    """On rank 0, replace a file atomically, since the run may be killed at any moment."""
    if hvd.rank() == 0:
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(path)


def restore(model, optimizer, device):
    """Broadcast rank 0's checkpoint, if there is one; return epochs done, images done of the next epoch, and steps."""
    progress = (0, 0, 0)
    if hvd.rank() == 0 and CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        progress = (state["epochs_done"], state["images_done"], state["step"])
        print(
            f"resumed after epoch {progress[0]}, image {progress[1]}; restart {os.environ['RESTART_COUNT']}", flush=True
        )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return hvd.broadcast_object(progress, root_rank=0)


def report_epoch(epoch, step, **values):
    """On rank 0, print a line and append it to METRICS_FILE, from which the console draws curves."""
    if hvd.rank() == 0:
        text = " ".join(f"{name} {value:.4f}" for name, value in values.items())
        print(f"epoch {epoch}/{EPOCHS} step {step} {text}", flush=True)
        line = {"epoch": epoch, "epochs": EPOCHS, "step": step, **values, "time": time.time()}
        with Path(os.environ["METRICS_FILE"]).open("a") as file:
            file.write(json.dumps(line) + "\n")


def main():
    """Train, evaluate after each epoch, and report."""
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *_: stop_signals.append(True))
    hvd.init()
    torch.manual_seed(7)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    loader, sampler = create_loader(read_digits("train"))
    test = read_digits("t10k")
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    epochs_done, images_done, step = restore(model, optimizer, device)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # Progress within an epoch is counted in images, since a later attempt may have batches of another size.
    total_batch_size = BATCH_SIZE * hvd.size()

    def must_stop():
        # All ranks must agree to stop, or the others would wait for those that have stopped.
        return sum_over_ranks("ending", len(stop_signals))[0] > 0

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
            output = model(images.to(device, non_blocking=True))
            batch_loss = nn.functional.cross_entropy(output, labels.to(device, non_blocking=True))
            batch_loss.backward()
            optimizer.step()
            step += 1
            losses.append(batch_loss.item())
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
        (train_loss,) = sum_over_ranks("loss", sum(losses) / len(losses) / hvd.size())
        report_epoch(epoch, step, loss=train_loss, accuracy=accuracy)
        # Check after each epoch too, because an epoch may have too few batches for a check within it.
        if epoch < EPOCHS and must_stop():
            is_stopping = True
            break
    if not is_stopping:
        save(model.state_dict(), OUTPUT)
    if hvd.rank() == 0:
        print(f"result: test accuracy {accuracy:.4f}, loss {first_loss:.2f} -> {loss:.2f}", flush=True)
        if is_stopping:
            print(f"stopped by SIGTERM: saved after epoch {epochs_done}, image {images_done}", flush=True)
    hvd.shutdown()
    if is_stopping:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
