"""Train a language model of bytes as a pipeline: each rank holds some of its blocks, and text flows through all ranks.

A batch is cut into microbatches. While a rank works on one, the rank before it works on the next; in the 1F1B schedule
each does one forward, then one backward, so that no more activations wait than there are ranks. Ranks only send
to their neighbours, which suits slow links between nodes.

At the start one batch goes through the whole model too, and the loss and all gradients must be equal. The model, the
training loop and the checkpoints are in charlm.py; a checkpoint goes on with another number of stages.

Buy: a dataset made by make_text.py, learning rate 0.003, batch size 16 (a multiple of 4), 1 to 4 ranks in all.
"""

import sys

import charlm
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

MICROBATCHES_PER_STAGE = 4
"""The more there are, the less the ranks idle while the pipeline fills and drains."""


def cut(model, rank, stages):
    """Leave in the model what this rank holds: its blocks, and what stands before the first or after the last."""
    numbers = range(rank * charlm.BLOCKS // stages, (rank + 1) * charlm.BLOCKS // stages)
    for name in list(model.blocks):
        if int(name) not in numbers:
            del model.blocks[name]
    if rank > 0:
        model.embed = model.position = None
    if rank < stages - 1:
        model.norm = model.head = None
    return list(numbers)


def main():
    """Keep this rank's stage of the model, and train it with the others."""
    device = charlm.start()
    rank, stages = dist.get_rank(), dist.get_world_size()
    microbatches = MICROBATCHES_PER_STAGE * stages
    if stages > charlm.BLOCKS:
        sys.exit(f"There are {charlm.BLOCKS} blocks: {stages} ranks are too many.")
    if charlm.BATCH % microbatches:
        sys.exit(f"The batch size must be a multiple of {MICROBATCHES_PER_STAGE}: it is cut into microbatches.")
    model = charlm.build().to(device)
    held = [None] * stages
    dist.all_gather_object(held, cut(model, rank, stages))
    charlm.say(f"blocks of each stage: {held}")
    stage = PipelineStage(model, rank, stages, device)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=charlm.loss_of)

    def step(inputs, targets):
        """Every rank calls it with the whole batch; the first uses the inputs, the last the targets."""
        losses = []
        schedule.step(*[inputs] * stage.is_first, target=targets if stage.is_last else None, losses=losses)
        return sum(losses) / microbatches if stage.is_last else None

    def score(inputs, targets):
        return schedule.eval(*[inputs] * stage.is_first, target=targets if stage.is_last else None)

    charlm.train(model, step, score, (0, 1), device)


if __name__ == "__main__":
    main()
