"""Train a small convolutional network on MNIST-layout digits with PyTorch DDP, on any number of nodes.

Everything comes from Trainyard's environment contract, nothing from the command line: the data from DATASETS_PATH and
DATASETS, the settings from EPOCHS, LR and BATCH_SIZE, the collectives from BACKEND and torch's `env://`. It

- scales the learning rate with the number of processes, and warms it up over the first epoch;
- evaluates on all ranks and reduces the result, so that every test image counts once;
- writes a checkpoint after each epoch, and one on SIGTERM, and goes on from it when it is started again.
"""

import json
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
METRICS = Path(os.environ["METRICS_FILE"])


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


def save(state):
    """Rank 0 writes the checkpoint, whole or not at all: a run may be cut off at any moment."""
    if dist.get_rank() == 0:
        temporary = CHECKPOINT.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(CHECKPOINT)


def main():
    """Train, evaluate after each epoch, and tell how it went."""
    asked_to_end = []
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.append(True))
    backend = os.environ["BACKEND"]
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)

    training, test = read_digits("train"), read_digits("t10k")
    sampler = DistributedSampler(training, seed=7)
    loader = DataLoader(training, batch_size=BATCH_SIZE, sampler=sampler)
    model = Digits().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * world_size, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / world_size, total_iters=len(loader))
    begun, step = 0, 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        warm_up.load_state_dict(state["warm_up"])
        begun, step = state["epoch"], state["step"]
        if rank == 0:
            print(f"resumed after epoch {begun}", flush=True)
    parallel = DistributedDataParallel(model)

    accuracy, loss = evaluate(model, test, device)
    first_loss = loss
    for epoch in range(begun + 1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            batch_loss = nn.functional.cross_entropy(parallel(images.to(device)), labels.to(device))
            batch_loss.backward()
            optimizer.step()
            warm_up.step()
            step += 1
            # All ranks must agree to end, or those that go on would wait for the others.
            train_loss, ending = reduced(device, batch_loss.item() / world_size, len(asked_to_end))
            if ending:
                break
        accuracy, loss = evaluate(model, test, device)
        # An epoch that was cut off is done again: it does not count.
        done = epoch - 1 if ending else epoch
        save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "warm_up": warm_up.state_dict(),
                "epoch": done,
                "step": step,
            }
        )
        if rank == 0:
            print(f"epoch {epoch}/{EPOCHS} step {step} loss {train_loss:.4f} accuracy {accuracy:.4f}", flush=True)
            with METRICS.open("a") as file:
                line = {"epoch": done, "epochs": EPOCHS, "step": step, "loss": train_loss, "accuracy": accuracy}
                file.write(json.dumps({**line, "time": time.time()}) + "\n")
        if ending:
            break
    if rank == 0:
        print(f"result: test accuracy {accuracy:.4f}, loss {first_loss:.2f} -> {loss:.2f}", flush=True)
    dist.destroy_process_group()
    if asked_to_end:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
