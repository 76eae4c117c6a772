"""A small language model of bytes and its training loop: what the examples of model parallelism have in common.

fsdp2.py, tensor_parallel.py and pipeline_parallel.py spread this one model over the ranks in three ways, and train it
on the same batches: BATCH_SIZE x WORLD_SIZE pieces of the text at a time, whatever the way. So their curves are those
of one process that takes the whole batch, up to rounding. Put this file beside them in the workspace.

The checkpoint is sharded (torch.distributed.checkpoint): each rank writes what it holds, and a run that goes on may
have another number of ranks. On SIGTERM the ranks write one in the middle of the epoch and leave with exit code 143.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.tensor import DTensor, Replicate

EPOCHS = int(os.environ["EPOCHS"])
LEARNING_RATE = float(os.environ["LR"])
BATCH = int(os.environ["BATCH_SIZE"]) * int(os.environ["WORLD_SIZE"])
CHECKPOINTS = Path(os.environ["CHECKPOINT_DIR"])
CONTEXT, WIDTH, HEAD_WIDTH, BLOCKS = 64, 64, 16, 4
HEADS = WIDTH // HEAD_WIDTH
TOLERANCE = 1e-4
ASK_EVERY = 4
"""Steps between two questions to all ranks whether one was told to end; a question is a small all-reduce."""


class Block(nn.Module):
    """Attention and a perceptron. Its projections may be split over ranks by heads: it asks none how many it has."""

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_perceptron = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """The residual stream after this block."""
        y = self.before_attention(x)
        query, key, value = (
            part(y).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.before_perceptron(x))))


class CharLM(nn.Module):
    """Log-probabilities of the next byte at each place. A pipeline's stage has some of the parts; others are None."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(BLOCKS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x):
        """From bytes, or the stream of the stage before, to log-probabilities, or the stream for the stage after."""
        if self.embed is not None:
            x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x)).log_softmax(-1)


def loss_of(scores, targets):
    """The mean cross entropy of all places, from log-probabilities."""
    return nn.functional.nll_loss(scores.flatten(0, 1), targets.flatten())


def read_text():
    """The first dataset's bytes in pieces of CONTEXT and one more; the last tenth of them is the test."""
    folder = Path(os.environ["DATASETS_PATH"]) / os.environ["DATASETS"].split(",")[0]
    text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.txt")))
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)
    test = len(pieces) // 10
    if test < BATCH:
        sys.exit(f"The test text has {test} pieces, less than a batch of {BATCH}: bring more text, or a smaller batch.")
    return pieces[:-test], pieces[-test:]


def batches(pieces, order, share, device, begun=0):
    """Inputs and targets of each whole batch: the part that share (k, n) means, the k-th of n. A rest is left out."""
    number, of = share
    for first in range(begun * BATCH, len(order) - BATCH + 1, BATCH):
        rows = order[first : first + BATCH].chunk(of)[number]
        piece = pieces[rows].to(device, torch.long)
        yield piece[:, :-1], piece[:, 1:]


def start():
    """Join the other ranks. Gives the device."""
    device = torch.device("cpu")
    if os.environ["BACKEND"] == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(os.environ["BACKEND"])
    return device


def build():
    """The model, on every rank with the same weights."""
    torch.manual_seed(7)
    return CharLM()


def say(text):
    """A line of rank 0's."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def reduced(device, *values):
    """Each value summed over all ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def save(model, optimizer, progress):
    """Each rank writes what it holds into a folder of this step, which is whole once `.metadata` is there, the last."""
    weights, moments = sharded.get_state_dict(
        model, optimizer, options=sharded.StateDictOptions(flatten_optimizer_state_dict=True)
    )
    folder = CHECKPOINTS / f"step-{progress['step']:08d}"
    dcp.save({"model": weights, "optimizer": moments, "progress": progress}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        for other in CHECKPOINTS.glob("step-*"):
            if other != folder:
                shutil.rmtree(other)


def restore(model, optimizer):
    """Take up the last whole checkpoint, if there is one. Gives the progress that it holds."""
    progress = {"done": 0, "batch": 0, "step": 0}
    if folders := sorted(file.parent for file in CHECKPOINTS.glob("step-*/.metadata")):
        options = sharded.StateDictOptions(flatten_optimizer_state_dict=True)
        weights, moments = sharded.get_state_dict(model, optimizer, options=options)
        state = {"model": weights, "optimizer": moments, "progress": progress}
        dcp.load(state, checkpoint_id=folders[-1])
        sharded.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
        progress = state["progress"]
        say("resumed after epoch {done}, batch {batch}".format(**progress) + f"; restart {os.environ['RESTART_COUNT']}")
    return progress


def check(model, step, text, share, device):
    """Leave, by SystemExit, unless loss and gradients of a batch are those of the whole model in one process.

    Leave this out where the model is too large for one device.
    """
    order = torch.arange(BATCH)
    whole = build().to(device)
    inputs, targets = next(batches(text, order, (0, 1), device))
    whole_loss = loss_of(whole(inputs), targets)
    whole_loss.backward()
    loss = step(*next(batches(text, order, share, device)))
    part = [0, 0] if loss is None else [loss.item(), 1]
    loss, count = reduced(device, *part)
    expected = dict(whole.named_parameters())
    gap = torch.tensor(abs(loss / count - whole_loss.item()), device=device)
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):  # one dimension of the mesh after the other, as they were cut
            grad = grad.redistribute(placements=[Replicate(), *grad.placements[1:]]).full_tensor()
        gap = torch.maximum(gap, (grad - expected[name].grad).abs().max())
    # An optimizer whose state is to be restored must find no gradients.
    model.zero_grad()
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    if not gap < TOLERANCE:
        sys.exit(f"The split model differs from the whole one by {gap:.1e}.")
    say(f"equal to the whole model: loss and gradients differ by {gap:.1e} at most")


def train(model, step, score, share, device):
    """Train EPOCHS epochs from the last checkpoint on; leaves by SystemExit where a rank was told to end.

    `share` (k, n): this rank takes the k-th of n parts of each batch. `step(inputs, targets)` makes the gradients and
    gives the loss, `score(inputs, targets)` gives the scores; both give None where a rank does not hold them.
    """
    told_to_end, ending = [], False
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(True))
    text, test = read_text()
    check(model, step, text, share, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    progress = restore(model, optimizer)
    for epoch in range(progress["done"] + 1, EPOCHS + 1):
        order = torch.randperm(len(text), generator=torch.Generator().manual_seed(epoch))
        total, count = 0.0, 0
        for inputs, targets in batches(text, order, share, device, progress["batch"]):
            optimizer.zero_grad()
            loss = step(inputs, targets)
            optimizer.step()
            progress["step"] += 1
            progress["batch"] += 1
            if loss is not None:
                total, count = total + loss.detach(), count + 1
            # All ranks must agree to end, or those that go on would wait for the others.
            if progress["step"] % ASK_EVERY == 0 and reduced(device, len(told_to_end))[0]:
                ending = True
                break
        if ending:
            break
        progress.update(done=epoch, batch=0)
        save(model, optimizer, progress)
        train_loss, count = reduced(device, float(total), count)
        tell(epoch, progress["step"], loss=train_loss / count, accuracy=accuracy(test, score, share, device))
    if ending:
        save(model, optimizer, progress)
        say("told to end: saved after epoch {done}, batch {batch}".format(**progress))
    dist.destroy_process_group()
    if ending:
        sys.exit(128 + signal.SIGTERM)


@torch.no_grad()
def accuracy(test, score, share, device):
    """How much of the test text is foretold: each rank looks at its share, and the sums are reduced."""
    right, count = 0, 0
    for inputs, targets in batches(test, torch.arange(len(test)), share, device):
        scores = score(inputs, targets)
        if scores is not None:
            right, count = right + (scores.argmax(-1) == targets).sum().item(), count + targets.numel()
    right, count = reduced(device, right, count)
    return right / count


def tell(epoch, step, **values):
    """Rank 0 says how it goes: a line of output for people, one of METRICS_FILE for the curves."""
    if dist.get_rank() == 0:
        words = " ".join(f"{name} {value:.4f}" for name, value in values.items())
        print(f"epoch {epoch}/{EPOCHS} step {step} {words}", flush=True)
        line = {"epoch": epoch, "epochs": EPOCHS, "step": step, **values, "time": time.time()}
        with Path(os.environ["METRICS_FILE"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
