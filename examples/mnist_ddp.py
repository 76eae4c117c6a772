"""Train a small convolutional network on MNIST-layout digits with PyTorch DDP, on any number of nodes.

Everything comes from Trainyard's environment contract, nothing from the command line: the data from DATASETS_PATH and
DATASETS, the settings from EPOCHS, LR and BATCH_SIZE, the collectives from BACKEND and torch's `env://`. It

- scales the learning rate with the number of processes, and warms it up over the first epoch;
- reads only this rank's share of the images, in a worker that loads the next batches while this one is trained on;
- evaluates on all ranks and reduces the result, so that every test image counts once;
- writes a checkpoint after each epoch, and goes on from it when it is started again; on SIGTERM it writes one at once,
  in the middle of the epoch, and leaves with exit code 143.

Buy: a dataset made by make_digits.py, learning rate 0.02, batch size 32, 1 node or more, 1 process or more.
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
ASK_EVERY = 4
"""Steps between two questions to all ranks whether one was told to end; a question is a small all-reduce."""


def read_idx(path):
    """One file of MNIST's format: a magic number that ends in the number of dimensions, their sizes, then bytes."""
    data = path.read_bytes()
    dimensions = data[3]
    sizes = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    return torch.frombuffer(bytearray(data[4 + 4 * dimensions :]), dtype=torch.uint8).reshape(sizes)


def read_digits(part):
    """The images, with a channel dimension and values around 0, and their labels."""
    folder = Path(os.environ["DATASETS_PATH"]) / os.environ["DATASETS"].split(",")[0] / "MNIST" / "raw"
    images = read_idx(folder / f"{part}-images-idx3-ubyte").float().unsqueeze(1) / 255
    images = (images - 0.15) / 0.3
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte").long()
    return TensorDataset(images, labels)


def share_of(data):
    """Batches of this rank's share, and the sampler that deals anew each epoch; a worker keeps a few batches ready."""
    sampler = DistributedSampler(data, seed=7)
    loader = DataLoader(
        data,
        BATCH_SIZE,
        sampler=sampler,
        num_workers=1,
        prefetch_factor=4,
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
        # Told to end, the run first writes its checkpoint: its worker must not go before it.
        worker_init_fn=lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    )
    atexit.register(end_workers)
    return loader, sampler


def end_workers():
    """At its end Python sends workers SIGTERM, which ours ignores, and waits for them: after an exception for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's own handler takes a killed worker for a fault
    for worker in multiprocessing.active_children():
        worker.kill()


class Digits(nn.Module):
    """Two convolutions and a linear layer; works for any image size from 8x8 up.

    Group normalization keeps it stable at the learning rates of many processes, and needs no word between them.
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
        """The classes' scores."""
        return self.classify(self.features(images).flatten(1))


def learning_rate(step, steps_in_epoch):
    """The learning rate bought, times the number of processes; reached in a straight line over the first epoch."""
    return LEARNING_RATE * (1 + (dist.get_world_size() - 1) * min(1, step / steps_in_epoch))


def reduced(device, *values):
    """Each value summed over all ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def evaluate(model, data, device):
    """Accuracy and mean loss on the test set; every rank takes its share of the images."""
    model.eval()
    share = range(dist.get_rank(), len(data), dist.get_world_size())
    images, labels = data[list(share)]
    with torch.no_grad():
        output = model(images.to(device))
        loss = nn.functional.cross_entropy(output, labels.to(device), reduction="sum")
    right = (output.argmax(1) == labels.to(device)).sum()
    right, loss, count = reduced(device, right.item(), loss.item(), len(labels))
    return right / count, loss / count


def save(state, path=CHECKPOINT):
    """Rank 0 writes the checkpoint, whole or not at all: a run may be cut off at any moment."""
    if dist.get_rank() == 0:
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(path)


def tell(epoch, step, **values):
    """Rank 0 says how it goes: a line of output for people, one of METRICS_FILE for the curves."""
    if dist.get_rank() == 0:
        words = " ".join(f"{name} {value:.4f}" for name, value in values.items())
        print(f"epoch {epoch}/{EPOCHS} step {step} {words}", flush=True)
        line = {"epoch": epoch, "epochs": EPOCHS, "step": step, **values, "time": time.time()}
        with Path(os.environ["METRICS_FILE"]).open("a") as file:
            file.write(json.dumps(line) + "\n")


def start():
    """Join the other ranks. Gives the device, and a list that is not empty once this rank was told to end."""
    told_to_end = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(True))
    device = torch.device("cpu")
    if os.environ["BACKEND"] == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(os.environ["BACKEND"])
    torch.manual_seed(7)
    return device, told_to_end


def main():
    """Train, evaluate after each epoch, and tell how it went."""
    device, told_to_end = start()
    loader, sampler = share_of(read_digits("train"))
    test = read_digits("t10k")
    model = Digits().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    whole_batch = BATCH_SIZE * dist.get_world_size()
    done, seen, step = 0, 0, 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, seen, step = state["done"], state["seen"], state["step"]
        if dist.get_rank() == 0:
            print(f"resumed after epoch {done}, image {seen}; restart {os.environ['RESTART_COUNT']}", flush=True)
    parallel = DistributedDataParallel(model)

    accuracy, loss = evaluate(model, test, device)
    first_loss, ending = loss, False
    for epoch in range(done + 1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        model.train()
        losses = []
        begun = seen // whole_batch
        for batch, (images, labels) in enumerate(itertools.islice(loader, begun, None), begun + 1):
            optimizer.param_groups[0]["lr"] = learning_rate(step, len(loader))
            optimizer.zero_grad()
            output = parallel(images.to(device, non_blocking=True))
            batch_loss = nn.functional.cross_entropy(output, labels.to(device, non_blocking=True))
            batch_loss.backward()
            optimizer.step()
            step += 1
            losses.append(batch_loss.detach())
            # All ranks must agree to end, or those that go on would wait for the others.
            if batch % ASK_EVERY == 0 and batch < len(loader) and reduced(device, len(told_to_end))[0]:
                ending, seen = True, batch * whole_batch
                break
        if not ending:
            done, seen = epoch, 0
        progress = {"done": done, "seen": seen, "step": step}
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **progress})
        if ending:
            break
        accuracy, loss = evaluate(model, test, device)
        (train_loss,) = reduced(device, torch.stack(losses).mean().item() / dist.get_world_size())
        tell(epoch, step, loss=train_loss, accuracy=accuracy)
    if dist.get_rank() == 0:
        print(f"result: test accuracy {accuracy:.4f}, loss {first_loss:.2f} -> {loss:.2f}", flush=True)
        if ending:
            print(f"told to end: saved after epoch {done}, image {seen}", flush=True)
    dist.destroy_process_group()
    if ending:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
