"""Train a language model of bytes with tensor parallelism inside each node, and data parallelism between nodes.

The matrices of each block are cut: queries, keys, values and the perceptron's first layer by columns, the layers after
them by rows, so that ranks work on the same text at the same time and meet twice in each block. That wants the fast
links inside a node; between nodes FSDP2 shards what is left. The mesh has two dimensions, (data, tensor):

- with 2 nodes of 2 processes it is 2 x 2, with 1 node of 4 processes 1 x 4, with 2 nodes of 1 process 1 x 2.

At the start one batch goes through the whole model too, and the loss and all gradients must be equal. The model, the
training loop and the checkpoints are in charlm.py.

Buy: a dataset made by make_text.py, learning rate 0.003, batch size 16, 1 node or more, 1, 2 or 4 processes.
"""

import math
import os

import charlm
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CUTS = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "mix": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def main():
    """Cut the blocks, shard them over the nodes, and train."""
    device = charlm.start()
    world_size, on_node = dist.get_world_size(), int(os.environ["WORKER_PER_NODE"])
    # Heads are not cut: as many ranks share a block as divide both their number and that of the ranks that are near.
    tensor = math.gcd(charlm.HEADS, on_node if on_node > 1 else world_size)
    mesh = init_device_mesh(device.type, (world_size // tensor, tensor), mesh_dim_names=("data", "tensor"))
    model = charlm.build().to(device)
    for block in model.blocks.values():
        parallelize_module(block, mesh["tensor"], CUTS)
    parallelize_module(model, mesh["tensor"], {"head": ColwiseParallel(output_layouts=Replicate())})
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    charlm.say(f"mesh of {mesh.size(0)} x {mesh.size(1)}: data x tensor")

    def step(inputs, targets):
        loss = charlm.loss_of(model(inputs), targets)
        loss.backward()
        return loss

    def score(inputs, _targets):
        return model(inputs)

    # Ranks that share a block take the same pieces of text.
    charlm.train(model, step, score, (mesh.get_local_rank("data"), mesh.size(0)), device)


if __name__ == "__main__":
    main()
