"""Train a language model of bytes with FSDP2: parameters, gradients and optimizer state are sharded over all ranks.

Each block is gathered just before it is used and let go after it, so a rank never holds the whole model. Take this
first when a model does not fit, because the model's code stays as it is. Checkpoints are sharded too, and a run may go
on with another number of ranks. At the start one batch goes through the whole model too, and the loss and all gradients
must be equal. The model, the training loop and the checkpoints are in charlm.py.

Buy: a dataset made by make_text.py, learning rate 0.003, batch size 16, 1 node or more, 1 process or more.
"""

import charlm
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    """Shard the model block by block, and train it."""
    device = charlm.start()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = charlm.build().to(device)
    # From the inside out: what is left for the last call are the parts outside the blocks.
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    charlm.say(f"each rank holds {held:,} of {whole:,} parameters")

    def step(inputs, targets):
        loss = charlm.loss_of(model(inputs), targets)
        loss.backward()
        return loss

    def score(inputs, _targets):
        return model(inputs)

    charlm.train(model, step, score, (dist.get_rank(), dist.get_world_size()), device)


if __name__ == "__main__":
    main()
