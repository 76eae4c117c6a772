"""Train the digits of mnist_ddp.py with local SGD: nodes work on their own, and average their models now and then.

Inside a node DDP averages the gradients of every step, as the links there are fast. Between nodes nothing is said for
AVERAGE_EVERY steps, then all parameters are averaged. So a slow network, or a node that is slow for a moment, holds the
others up only that often: as much of asynchronous training as leaves the result repeatable. It is *post-local* SGD (Lin
et al., 2020): in the first epoch, while the weights move fast, nodes average after every step, which comes to the same
as DDP over all of them. The last line says how much communication was saved. The network, the data and the ways to
evaluate and save are those of mnist_ddp.py: put that file beside this one.

Checkpoints, resume and SIGTERM (exit code 143) are as there; what is saved is the nodes' average.

Buy: a dataset made by make_digits.py, learning rate 0.02, batch size 32, 2 nodes or more, 1 process or more.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

import mnist_ddp as digits
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = Path(os.environ["CHECKPOINT_DIR"]) / "local_sgd.pt"
AVERAGE_EVERY = 8
EPOCHS_TOGETHER = 1


@torch.no_grad()
def average(tensors, told_to_end):
    """Put the mean over all ranks into each tensor. Gives the numbers sent, and whether any rank was told to end."""
    # The question whether to end goes along: between two averages the nodes say nothing at all.
    flat = torch.cat([tensor.flatten() for tensor in tensors] + [tensors[0].new_tensor([len(told_to_end)])])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    *means, asked = flat.split([tensor.numel() for tensor in tensors] + [1])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view_as(tensor))
    return len(flat), asked.item() > 0


def main():
    """Train, evaluate after each epoch, and tell how it went and what was sent."""
    device, told_to_end = digits.start()
    loader, sampler = digits.share_of(digits.read_digits("train"))
    test = digits.read_digits("t10k")
    model = digits.Digits().to(device)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=digits.LEARNING_RATE, momentum=0.9)
    whole_batch = digits.BATCH_SIZE * dist.get_world_size()
    done, seen, step, sent = 0, 0, 0, 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, seen, step, sent = state["done"], state["seen"], state["step"], state["sent"]
        if dist.get_rank() == 0:
            print(f"resumed after epoch {done}, image {seen}; restart {os.environ['RESTART_COUNT']}", flush=True)
    on_this_node, _all_nodes = dist.new_subgroups(int(os.environ["WORKER_PER_NODE"]))
    parallel = DistributedDataParallel(model, process_group=on_this_node)

    accuracy, loss = digits.evaluate(model, test, device)
    first_loss, ending = loss, False
    for epoch in range(done + 1, digits.EPOCHS + 1):
        sampler.set_epoch(epoch)
        model.train()
        losses = []
        begun = seen // whole_batch
        for batch, (images, labels) in enumerate(itertools.islice(loader, begun, None), begun + 1):
            optimizer.param_groups[0]["lr"] = digits.learning_rate(step, len(loader))
            optimizer.zero_grad()
            output = parallel(images.to(device, non_blocking=True))
            batch_loss = nn.functional.cross_entropy(output, labels.to(device, non_blocking=True))
            batch_loss.backward()
            optimizer.step()
            step += 1
            losses.append(batch_loss.detach())
            if epoch <= EPOCHS_TOGETHER or batch % AVERAGE_EVERY == 0:
                numbers, asked = average(weights, told_to_end)
                sent += numbers
                if asked and batch < len(loader):
                    ending, seen = True, batch * whole_batch
                    break
        if not ending:
            done, seen = epoch, 0
        # What is saved, and goes on, is the same everywhere: the momentum too.
        momentum = [optimizer.state[weight]["momentum_buffer"] for weight in weights]
        sent += average(weights + momentum, told_to_end)[0]
        progress = {"done": done, "seen": seen, "step": step, "sent": sent}
        digits.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **progress}, CHECKPOINT)
        if ending:
            break
        accuracy, loss = digits.evaluate(model, test, device)
        (train_loss,) = digits.reduced(device, torch.stack(losses).mean().item() / dist.get_world_size())
        digits.tell(epoch, step, loss=train_loss, accuracy=accuracy)
    if dist.get_rank() == 0:
        with_ddp = step * sum(weight.numel() for weight in weights)
        if os.environ["WORLD_SIZE"] != os.environ["WORKER_PER_NODE"]:
            print(f"sent between nodes: {sent:,} numbers, {sent / with_ddp:.0%} of the {with_ddp:,} of DDP")
        print(f"result: test accuracy {accuracy:.4f}, loss {first_loss:.2f} -> {loss:.2f}", flush=True)
        if ending:
            print(f"told to end: saved after epoch {done}, image {seen}", flush=True)
    dist.destroy_process_group()
    if ending:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
