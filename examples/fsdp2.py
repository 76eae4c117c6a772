"""Train a language model of bytes with FSDP2: parameters, gradients and optimizer state are sharded over all ranks.

Each block's parameters are gathered just before the block is used and freed afterwards, so no device ever holds the
whole model that is trained. Try FSDP2 first if a model does not fit on one device, because the model's code stays as it
is. At the start, loss and gradients of one batch are compared with those of the whole model. The model, the training
loop and the checkpoints are in charlm.py.

Order: a dataset from make_text.py, learning rate 0.003, batch size 16, 1 node or more, 1 process or more.
"""

import charlm
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    """Shard the model block by block, and train it."""
    device = charlm.start()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    # In the memory of the CPU: `fully_shard` moves one block after the other to the device.
    model = charlm.build_model()
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # last, for the layers outside the blocks

    own_parameters = sum(parameter.to_local().numel() for parameter in model.parameters())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    charlm.print_once(f"each rank holds {own_parameters:,} of {parameters:,} parameters")

    def step(inputs, targets):
        loss = charlm.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    def predict(inputs, _targets):
        return model(inputs)

    # Each rank trains on its own part of every batch.
    charlm.train(model, step, predict, (dist.get_rank(), dist.get_world_size()), device)


if __name__ == "__main__":
    main()
