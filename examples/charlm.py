"""A small language model of bytes and its training loop, for the examples of model parallelism.

fsdp2.py, tensor_parallel.py and pipeline_parallel.py split this model over the ranks in three ways. All train it on the
same batches of BATCH_SIZE x WORLD_SIZE sequences. Their loss curves are therefore those of one process that trains on
the whole batch, up to rounding. Put this file beside them in the workspace.

The checkpoint is sharded (torch.distributed.checkpoint): each rank writes its own part. A later attempt may have
another number of ranks, but needs the same BATCH_SIZE x WORLD_SIZE, because the checkpoint counts batches. On SIGTERM
the ranks write a checkpoint in the middle of the epoch and exit with code 143.
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate

EPOCHS = int(os.environ["EPOCHS"])
LEARNING_RATE = float(os.environ["LR"])
TOTAL_BATCH_SIZE = int(os.environ["BATCH_SIZE"]) * int(os.environ["WORLD_SIZE"])
CHECKPOINTS = Path(os.environ["CHECKPOINT_DIR"])
OUTPUT = Path(os.environ["OUTPUT_DIR"]) / "model"
"""The trained model, as `torch.distributed.checkpoint` writes it. A stopped run has only its checkpoint."""
CONTEXT, WIDTH, HEAD_WIDTH, BLOCKS = 64, 64, 16, 4
"""Bytes in a sequence, width of the model and of an attention head, and number of blocks: few, for CPU nodes."""
HEADS = WIDTH // HEAD_WIDTH
TOLERANCE = 1e-4
"""How much the loss and gradients of the split model may differ from those of the whole one, by rounding."""
STOP_CHECK_STEPS = 4
"""Steps between two small all-reduces by which the ranks find out whether any rank has received SIGTERM.

An all-reduce after each step would slow the training down. A few steps take much less than the grace period (10
seconds).
"""


class Block(nn.Module):
    """Attention and a perceptron. The number of heads is not fixed, since tensor parallelism splits them over ranks."""

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_perceptron = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.mix = nn.Linear(WIDTH, WIDTH)  # of the heads' results
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Return the residual stream after this block."""
        normalized = self.before_attention(x)
        query, key, value = (
            layer(normalized).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attention = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attention.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.before_perceptron(x))))


class CharLM(nn.Module):
    """The log-probabilities of each next byte. A stage of a pipeline has only some of the layers; others are None."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(BLOCKS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x):
        """Map bytes to log-probabilities. In a pipeline, input and output may be another stage's residual stream."""
        if self.embed is not None:
            x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x)).log_softmax(-1)


def cross_entropy(log_probabilities, targets):
    """Return the mean over all positions."""
    return nn.functional.nll_loss(log_probabilities.flatten(0, 1), targets.flatten())


def read_text():
    """Return the first dataset as sequences of CONTEXT + 1 bytes, for training and (the last tenth) for the test."""
    folder = Path(os.environ["DATASETS_PATH"]) / os.environ["DATASETS"].split(",")[0]
    text = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.txt")))
    # A tenth of the sequences. One begins every CONTEXT bytes, and shares its last byte with the next one.
    test_size = max(0, len(text) - 1) // CONTEXT // 10
    if test_size < TOTAL_BATCH_SIZE:
        sys.exit(
            f"The test set has {test_size} sequences, fewer than a batch of {TOTAL_BATCH_SIZE}. Use more text or a "
            "smaller batch size."
        )
    sequences = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)
    return sequences[:-test_size], sequences[-test_size:]


def batches(sequences, order, share, device, first_batch=0):
    """Yield inputs and targets of each complete batch, from `first_batch` on.

    `order` has the numbers of the sequences in the epoch's order. `share` is (part, parts): each batch is split into
    `parts` parts, and this rank gets the part with the number `part`.
    """
    part, parts = share
    for start in range(first_batch * TOTAL_BATCH_SIZE, len(order) - TOTAL_BATCH_SIZE + 1, TOTAL_BATCH_SIZE):
        rows = order[start : start + TOTAL_BATCH_SIZE].chunk(parts)[part]
        batch = sequences[rows].to(device, torch.long)
        yield batch[:, :-1], batch[:, 1:]


def start():
    """Join the other ranks; return this rank's device."""
    device = torch.device("cpu")
    if os.environ["BACKEND"] == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(os.environ["BACKEND"])
    return device


def build_model():
    """Return the model, with the same weights on every rank."""
    torch.manual_seed(7)
    return CharLM()


def print_once(text):
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def sum_over_ranks(device, *values):
    """Return each value summed over all ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def save(model, optimizer, progress):
    """Write a checkpoint into a folder of this step. The last file, `.metadata`, marks it as complete."""
    # Flat: each value is named by its parameter, so that ranks with other parts of the model can load it.
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, optimizer_state = get_state_dict(model, optimizer, options=options)
    folder = CHECKPOINTS / f"step-{progress['step']:08d}"
    dcp.save({"model": weights, "optimizer": optimizer_state, "progress": progress}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        for other in CHECKPOINTS.glob("step-*"):
            if other != folder:
                shutil.rmtree(other)


def restore(model, optimizer):
    """Load the last complete checkpoint, if there is one; return its progress."""
    progress = {"epochs_done": 0, "batches_done": 0, "step": 0}
    if folders := sorted(file.parent for file in CHECKPOINTS.glob("step-*/.metadata")):
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        weights, optimizer_state = get_state_dict(model, optimizer, options=options)
        # `load` overwrites the values in this dict.
        checkpoint = {"model": weights, "optimizer": optimizer_state, "progress": progress}
        dcp.load(checkpoint, checkpoint_id=folders[-1])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optimizer_state, options=options)
        progress = checkpoint["progress"]
        print_once(f"resumed {describe(progress)}; restart {os.environ['RESTART_COUNT']}")
    return progress


def describe(progress):
    """Return where training is, as text."""
    return "after epoch {epochs_done}, batch {batches_done}".format(**progress)


def compare_with_whole_model(model, step, sequences, share, device):
    """Exit unless loss and gradients of a batch equal those of the whole model in one process.

    Omit this if the model is too large for one device. `step` and `share`: see `train`.
    """
    order = torch.arange(TOTAL_BATCH_SIZE)
    whole_model = build_model().to(device)
    inputs, targets = next(batches(sequences, order, (0, 1), device))
    whole_loss = cross_entropy(whole_model(inputs), targets)
    whole_loss.backward()
    loss = step(*next(batches(sequences, order, share, device)))
    # In a pipeline only the last stage has the loss.
    loss_sum, ranks_with_loss = sum_over_ranks(device, *([0, 0] if loss is None else [loss.item(), 1]))
    difference = torch.tensor(abs(loss_sum / ranks_with_loss - whole_loss.item()), device=device)
    whole_parameters = dict(whole_model.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            # The mesh is (FSDP, tensor). Parameters were split by tensor parallelism, then again by FSDP. Undo this in
            # reverse, FSDP before tensor; `full_tensor` alone would do it the other way round.
            gradient = gradient.redistribute(placements=[Replicate(), *gradient.placements[1:]]).full_tensor()
        difference = torch.maximum(difference, (gradient - whole_parameters[name].grad).abs().max())
    model.zero_grad()  # `restore` calls `get_state_dict`, which needs parameters without gradients
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    if not difference < TOLERANCE:  # also true for NaN
        sys.exit(f"The split model differs from the whole one by {difference:.1e}.")
    print_once(f"equal to the whole model: loss and gradients differ by {difference:.1e} at most")


def train(model, step, score, share, device):
    """Train EPOCHS epochs, from the last checkpoint on. Exits with code 143 if a rank receives SIGTERM.

    `share`: see `batches`. `step(inputs, targets)` computes the gradients and returns the loss. `score(inputs,
    targets)` returns the log-probabilities. Both return None on ranks that do not have the result.
    """
    stop_signals, is_stopping = [], False
    signal.signal(signal.SIGTERM, lambda *_: stop_signals.append(True))
    sequences, test = read_text()
    compare_with_whole_model(model, step, sequences, share, device)
    # With tensor parallelism, parameters are on different meshes, which one foreach operation cannot combine.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    progress = restore(model, optimizer)
    for epoch in range(progress["epochs_done"] + 1, EPOCHS + 1):
        order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(epoch))
        loss_sum, steps = 0.0, 0
        for inputs, targets in batches(sequences, order, share, device, progress["batches_done"]):
            optimizer.zero_grad()
            loss = step(inputs, targets)
            optimizer.step()
            progress["step"] += 1
            progress["batches_done"] += 1
            if loss is not None:
                loss_sum, steps = loss_sum + loss.detach(), steps + 1
            # All ranks must agree to stop, or the others would wait for those that have stopped.
            if progress["step"] % STOP_CHECK_STEPS == 0 and sum_over_ranks(device, len(stop_signals))[0]:
                is_stopping = True
                break
        # If this was the epoch's last batch, finish the epoch first: a later attempt would find no batch left in it.
        if is_stopping and progress["batches_done"] < len(order) // TOTAL_BATCH_SIZE:
            save(model, optimizer, progress)
            break
        progress.update(epochs_done=epoch, batches_done=0)
        save(model, optimizer, progress)
        loss_sum, steps = sum_over_ranks(device, float(loss_sum), steps)
        report_epoch(epoch, progress["step"], loss=loss_sum / steps, accuracy=accuracy(test, score, share, device))
        if is_stopping:
            break
    if progress["epochs_done"] >= EPOCHS:
        dcp.save(get_model_state_dict(model), checkpoint_id=OUTPUT)
    if is_stopping:
        print_once(f"stopped by SIGTERM: saved {describe(progress)}")
    dist.destroy_process_group()
    if is_stopping:
        sys.exit(128 + signal.SIGTERM)


@torch.no_grad()
def accuracy(test, score, share, device):
    """Return the fraction of the test set's bytes that the model predicts; each rank computes its part."""
    correct, count = 0, 0
    for inputs, targets in batches(test, torch.arange(len(test)), share, device):
        log_probabilities = score(inputs, targets)
        if log_probabilities is not None:
            correct += (log_probabilities.argmax(-1) == targets).sum().item()
            count += targets.numel()
    correct, count = sum_over_ranks(device, correct, count)
    return correct / count


def report_epoch(epoch, step, **values):
    """On rank 0, print a line and append it to METRICS_FILE, from which the console draws curves."""
    if dist.get_rank() == 0:
        text = " ".join(f"{name} {value:.4f}" for name, value in values.items())
        print(f"epoch {epoch}/{EPOCHS} step {step} {text}", flush=True)
        line = {"epoch": epoch, "epochs": EPOCHS, "step": step, **values, "time": time.time()}
        with Path(os.environ["METRICS_FILE"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
