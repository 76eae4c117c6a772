"""Train a language model of bytes with tensor parallelism inside each node, and data parallelism between nodes.

The matrices of each block are split: queries, keys, values and the perceptron's first layer by columns, the layers
after them by rows. Ranks then work on the same sequences and exchange data twice per block. This needs the fast links
inside a node. Between nodes, FSDP2 shards each rank's part. The mesh has two dimensions, (data, tensor). For example,
2 nodes with 2 processes each give 2 x 2, and 1 node with 4 processes gives 1 x 4. If each node has only
1 process, the nodes share the blocks: 2 nodes give 1 x 2.

At the start, loss and gradients of one batch are compared with those of the whole model. The model, the training loop
and the checkpoints are in charlm.py.

What to order: a dataset from make_text.py, learning rate 0.003, batch size 16, 1 node or more, 1, 2 or 4 processes.
"""

import math
import os

import charlm
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

BLOCK_PLAN = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "mix": RowwiseParallel(),  # the attention's output projection
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def main():
    """Split the blocks inside nodes, shard them over nodes, and train."""
    device = charlm.start()
    world_size, processes_per_node = dist.get_world_size(), int(os.environ["WORKER_PER_NODE"])
    # Heads cannot be split, so the number of ranks that share a block must divide the number of heads.
    ranks_per_block = math.gcd(charlm.HEADS, processes_per_node if processes_per_node > 1 else world_size)
    mesh_shape = (world_size // ranks_per_block, ranks_per_block)
    mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=("data", "tensor"))
    model = charlm.build_model().to(device)
    for block in model.blocks.values():
        parallelize_module(block, mesh["tensor"], BLOCK_PLAN)
    # Replicated, because `log_softmax` needs the output for all 256 bytes.
    parallelize_module(model, mesh["tensor"], {"head": ColwiseParallel(output_layouts=Replicate())})
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    charlm.print_once(f"mesh of {mesh.size(0)} x {mesh.size(1)}: data x tensor")

    def step(inputs, targets):
        loss = charlm.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    # The training loop also passes the targets, which are not needed here.
    def score(inputs, _targets):
        return model(inputs)

    # Ranks that share a block train on the same sequences.
    charlm.train(model, step, score, (mesh.get_local_rank("data"), mesh.size(0)), device)


if __name__ == "__main__":
    main()
