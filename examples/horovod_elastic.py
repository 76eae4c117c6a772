"""Train on digits in MNIST's file format with Horovod's elastic mode: after a lost node the others go on.

With `@hvd.elastic.run` the remaining processes return to the last `state.commit()`, and reconnect with new ranks and a
new size. They divide the rest of the epoch's images among themselves, and continue. No process restarts, and nothing is
read from disk. The script

- commits every few steps, so that a lost node costs at most that many steps;
- scales the learning rate with the number of processes whenever that changes;
- evaluates on all ranks and reduces the result, so that every test image counts once;
- also writes a checkpoint after each epoch on rank 0, for an attempt after too many nodes were lost.

Order: the image `horovod`, a dataset from make_digits.py, learning rate 0.02, batch size 32, 2 nodes or more, and a
smaller minimum of nodes.
"""

import json
import os
import struct
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

EPOCHS = int(os.environ["EPOCHS"])
LEARNING_RATE = float(os.environ["LR"])
BATCH_SIZE = int(os.environ["BATCH_SIZE"])
CHECKPOINT = Path(os.environ["CHECKPOINT_DIR"]) / "elastic.pt"
OUTPUT = Path(os.environ["OUTPUT_DIR"]) / "model.pt"
"""The trained model."""
COMMIT_STEPS = 4
"""Steps between two commits. A commit copies model and optimizer in memory."""


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
    return images, read_idx(folder / f"{part}-labels-idx1-ubyte").long()


def build_model():
    """Return a convolution, which turns 28x28 pixels into 16 maps of 12x12, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 12 * 12, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def report_epoch(**values):
    """On rank 0, print a line and append it to METRICS_FILE, from which the console draws curves."""
    if hvd.rank() == 0:
        print(" ".join(f"{name} {value:.4g}" for name, value in values.items()), f"on {hvd.size()}", flush=True)
        with Path(os.environ["METRICS_FILE"]).open("a") as file:
            file.write(json.dumps({**values, "time": time.time()}) + "\n")


def save(contents, path):
    """On rank 0, replace a file atomically, since the run may be killed at any moment."""
    if hvd.rank() == 0:
        temporary = path.with_suffix(".tmp")
        torch.save(contents, temporary)
        temporary.replace(path)


@hvd.elastic.run
def train(state, images, labels, test_images, test_labels):
    """Train from the state to the last epoch. Horovod calls this again, with the last commit, if a node was lost."""
    while state.epoch < EPOCHS:
        state.model.train()
        share = list(state.sampler)
        for number, start in enumerate(range(0, len(share), BATCH_SIZE)):
            batch = share[start : start + BATCH_SIZE]
            state.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(state.model(images[batch]), labels[batch])
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(number, BATCH_SIZE)
            state.step += 1
            state.loss = loss.item()
            if state.step % COMMIT_STEPS == 0:
                state.commit()
        accuracy = evaluate(state.model, test_images, test_labels)
        state.epoch += 1
        # At the end of the epoch, because this resets which images were processed.
        state.sampler.set_epoch(state.epoch)
        # If a node was lost at the end of the epoch, no image is left to train on, and the loss is the last commit's.
        report_epoch(
            epoch=state.epoch, step=state.step, loss=state.loss, accuracy=accuracy, lr=learning_rate(state.optimizer)
        )
        model, optimizer = state.model.state_dict(), state.optimizer.state_dict()
        save({"model": model, "optimizer": optimizer, "epoch": state.epoch}, CHECKPOINT)
        state.commit()


def learning_rate(optimizer):
    """Return the optimizer's current learning rate."""
    return optimizer.param_groups[0]["lr"]


def scale_learning_rate(optimizer):
    """Set the learning rate for the current number of processes."""
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * hvd.size()


def evaluate(model, images, labels):
    """Return the accuracy on the test set. Each rank evaluates its share of the images."""
    model.eval()
    share = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        correct = (model(images[share]).argmax(1) == labels[share]).sum()
    return hvd.allreduce(correct, op=hvd.Sum, name="correct").item() / len(labels)


def main():
    """Train, from the checkpoint if there is one."""
    hvd.init()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    images, labels = read_digits("train")
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * hvd.size(), momentum=0.9)
    epoch = 0
    if CHECKPOINT.exists():
        checkpoint = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scale_learning_rate(optimizer)  # the checkpoint has the rate for an earlier number of processes
        epoch = checkpoint["epoch"]
        print(f"resumed after epoch {epoch}", flush=True)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(images, seed=7)
    sampler.set_epoch(epoch)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=epoch, step=0, loss=0.0)

    def handle_new_size():
        scale_learning_rate(optimizer)
        print(f"a node was lost: going on as rank {hvd.rank()} of {hvd.size()}", flush=True)

    state.register_reset_callbacks([handle_new_size])
    train(state, images, labels, *read_digits("t10k"))
    save(model.state_dict(), OUTPUT)
    print(f"result: {state.epoch} epochs, rank {hvd.rank()} of {hvd.size()}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
