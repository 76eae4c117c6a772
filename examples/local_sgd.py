"""Train the digits of mnist_ddp.py with local SGD: nodes train by themselves, and average their models periodically.

Inside a node, whose links are fast, DDP averages the gradients of every step. Between nodes, all parameters are
averaged every AVERAGE_STEPS steps, and nothing is sent in between. A slow network or node therefore delays the others
only at these steps. Unlike in asynchronous training, the result is repeatable. This is *post-local* SGD (Lin et al.,
2020): in the first epoch, while the weights change fast, nodes average after every step. That equals DDP over all
nodes. At the end the script prints how much communication was saved. Put mnist_ddp.py, which has the network,
the data, evaluation and saving, beside this file.

Checkpoints, resuming and SIGTERM (exit code 143) work as in mnist_ddp.py. The checkpoint has the nodes' average.

Order: a dataset from make_digits.py, learning rate 0.02, batch size 32, 2 nodes or more, 1 process or more.
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
AVERAGE_STEPS = 8
"""Steps between two averages over the nodes: communication is an eighth of DDP's."""
SYNCHRONOUS_EPOCHS = 1
"""First epochs in which nodes average after every step."""


@torch.no_grad()
def average_over_ranks(tensors, stop_signals):
    """Replace each tensor by its mean over all ranks.

    Returns how many numbers this rank sent, and whether any rank has received SIGTERM.
    """
    # The stop signals are sent in the same all-reduce, because nodes send nothing between two averages.
    values = torch.cat([tensor.flatten() for tensor in tensors] + [tensors[0].new_tensor([len(stop_signals)])])
    dist.all_reduce(values)
    values /= dist.get_world_size()
    *means, is_stop_requested = values.split([tensor.numel() for tensor in tensors] + [1])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view_as(tensor))
    return len(values), is_stop_requested.item() > 0


def restore(model, optimizer, device):
    """Read the checkpoint, if there is one; return epochs done, images done of the next epoch, steps, numbers sent."""
    if not CHECKPOINT.exists():
        return 0, 0, 0, 0
    state = torch.load(CHECKPOINT, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    epochs_done, images_done = state["epochs_done"], state["images_done"]
    if dist.get_rank() == 0:
        print(
            f"resumed after epoch {epochs_done}, image {images_done}; restart {os.environ['RESTART_COUNT']}", flush=True
        )
    return epochs_done, images_done, state["step"], state["numbers_sent"]


def print_traffic(numbers_sent, numbers_of_ddp):
    """Print how many numbers the nodes have sent, compared with DDP; nothing if there is one node."""
    if os.environ["WORLD_SIZE"] != os.environ["WORKER_PER_NODE"]:
        share = numbers_sent / numbers_of_ddp
        print(f"sent between nodes: {numbers_sent:,} numbers, {share:.0%} of the {numbers_of_ddp:,} of DDP")


def main():
    """Train, evaluate after each epoch, and report progress and communication."""
    device, stop_signals = digits.start()
    loader, sampler = digits.create_loader(digits.read_digits("train"))
    test = digits.read_digits("t10k")
    model = digits.Digits().to(device)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=digits.LEARNING_RATE, momentum=0.9)
    total_batch_size = digits.BATCH_SIZE * dist.get_world_size()
    epochs_done, images_done, step, numbers_sent = restore(model, optimizer, device)
    node_group, _all_groups = dist.new_subgroups(int(os.environ["WORKER_PER_NODE"]))
    ddp_model = DistributedDataParallel(model, process_group=node_group)

    accuracy, loss = digits.evaluate(model, test, device)
    first_loss, is_stopping = loss, False
    for epoch in range(epochs_done + 1, digits.EPOCHS + 1):
        sampler.set_epoch(epoch)
        model.train()
        losses = []
        batches_done = images_done // total_batch_size
        for batch, (images, labels) in enumerate(itertools.islice(loader, batches_done, None), batches_done + 1):
            optimizer.param_groups[0]["lr"] = digits.learning_rate(step, len(loader))
            optimizer.zero_grad()
            output = ddp_model(images.to(device, non_blocking=True))
            batch_loss = nn.functional.cross_entropy(output, labels.to(device, non_blocking=True))
            batch_loss.backward()
            optimizer.step()
            step += 1
            losses.append(batch_loss.detach())
            if epoch <= SYNCHRONOUS_EPOCHS or batch % AVERAGE_STEPS == 0:
                count, is_stop_requested = average_over_ranks(parameters, stop_signals)
                numbers_sent += count
                # After the last batch, the epoch is finished and saved below. A checkpoint here would leave a later
                # attempt an epoch with no batch left.
                if is_stop_requested and batch < len(loader):
                    is_stopping, images_done = True, batch * total_batch_size
                    break
        if not is_stopping:
            epochs_done, images_done = epoch, 0
        # Averaged like the parameters, because the checkpoint has one momentum and every node continues from it.
        momentum = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
        count, is_stop_requested = average_over_ranks(parameters + momentum, stop_signals)
        numbers_sent += count
        progress = {"epochs_done": epochs_done, "images_done": images_done, "step": step, "numbers_sent": numbers_sent}
        digits.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **progress}, CHECKPOINT)
        if is_stopping:
            break
        accuracy, loss = digits.evaluate(model, test, device)
        (train_loss,) = digits.sum_over_ranks(device, torch.stack(losses).mean().item() / dist.get_world_size())
        digits.report_epoch(epoch, step, loss=train_loss, accuracy=accuracy)
        # Stop after an epoch too, because an epoch may have too few batches for an average within it.
        if epoch < digits.EPOCHS and is_stop_requested:
            is_stopping = True
            break
    if not is_stopping:
        digits.save(model.state_dict(), digits.OUTPUT)
    if dist.get_rank() == 0:
        numbers_of_ddp = step * sum(parameter.numel() for parameter in parameters)
        print_traffic(numbers_sent, numbers_of_ddp)
        print(f"result: test accuracy {accuracy:.4f}, loss {first_loss:.2f} -> {loss:.2f}", flush=True)
        if is_stopping:
            print(f"stopped by SIGTERM: saved after epoch {epochs_done}, image {images_done}", flush=True)
    dist.destroy_process_group()
    if is_stopping:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
