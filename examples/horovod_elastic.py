"""Train on MNIST-layout digits with Horovod's elastic mode: when a node is lost, the others go on where they are.

With `@hvd.elastic.run` the processes that are left keep their memory: they go back to the last `state.commit()`, find
each other anew with new ranks and a new size, deal the images of this epoch that nobody has seen among themselves, and
train on. Nothing is started again, and nothing is read from disk. The script

- commits every few steps: what is lost with a node is at most that many steps;
- scales the learning rate with the number of processes, anew whenever that changes;
- evaluates on all ranks and reduces the result, so that every test image counts once;
- writes a checkpoint after each epoch on rank 0 besides, for the day when too many nodes are lost and the run is
  started again from the beginning.

Buy: the image `horovod`, a dataset made by make_digits.py, learning rate 0.02, batch size 32, 2 nodes or more, and a
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
COMMIT_EVERY = 4


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
    return (images - 0.15) / 0.3, read_idx(folder / f"{part}-labels-idx1-ubyte").long()


def network():
    """A convolution and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 144, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def say(**values):
    """Rank 0 says how it goes: a line of output for people, one of METRICS_FILE for the curves."""
    if hvd.rank() == 0:
        print(" ".join(f"{name} {value:.4g}" for name, value in values.items()), f"on {hvd.size()}", flush=True)
        with Path(os.environ["METRICS_FILE"]).open("a") as file:
            file.write(json.dumps({**values, "time": time.time()}) + "\n")


def save(state):
    """Rank 0 writes the checkpoint, whole or not at all: a run may be cut off at any moment."""
    if hvd.rank() == 0:
        temporary = CHECKPOINT.with_suffix(".tmp")
        parts = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(), "epoch": state.epoch}
        torch.save(parts, temporary)
        temporary.replace(CHECKPOINT)


@hvd.elastic.run
def train(state, images, labels, test_images, test_labels):
    """From where the state stands to the last epoch. Called again, with the last commit, whenever a node was lost."""
    while state.epoch < EPOCHS:
        state.model.train()
        mine = list(state.sampler)
        for number, at in enumerate(range(0, len(mine), BATCH_SIZE)):
            batch = mine[at : at + BATCH_SIZE]
            state.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(state.model(images[batch]), labels[batch])
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(number, BATCH_SIZE)
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()
        accuracy = evaluate(state.model, test_images, test_labels)
        state.epoch += 1
        # At the end of the epoch: it forgets which images were seen.
        state.sampler.set_epoch(state.epoch)
        say(epoch=state.epoch, step=state.step, loss=loss.item(), accuracy=accuracy)
        save(state)
        state.commit()


def evaluate(model, images, labels):
    """Accuracy on the test set; every rank takes its share of the images."""
    model.eval()
    mine = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    return hvd.allreduce(right, op=hvd.Sum, name="right").item() / len(labels)


def main():
    """Train, from the checkpoint where there is one."""
    hvd.init()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    images, labels = read_digits("train")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * hvd.size(), momentum=0.9)
    epoch = 0
    if CHECKPOINT.exists():
        parts = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
        epoch = parts["epoch"]
        print(f"resumed after epoch {epoch}", flush=True)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(images, seed=7)
    sampler.set_epoch(epoch)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=epoch, step=0)

    def scale_learning_rate():
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * hvd.size()
        print(f"a node was lost: going on as rank {hvd.rank()} of {hvd.size()}", flush=True)

    state.register_reset_callbacks([scale_learning_rate])
    train(state, images, labels, *read_digits("t10k"))
    print(f"result: {state.epoch} epochs, rank {hvd.rank()} of {hvd.size()}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
