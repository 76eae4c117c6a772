"""Train a language model of bytes as a pipeline: each rank is a stage with some of the blocks, and passes data on.

A batch is split into microbatches. While a rank works on one, the rank before it works on the next. In the 1F1B
schedule each rank alternates between one forward and one backward pass. So a rank keeps the intermediate results of at
most as many microbatches as there are ranks. Ranks send only to their neighbours, which suits slow networks between
nodes.

At the start, loss and gradients of one batch are compared with those of the whole model. The model, the training loop
and the checkpoints are in charlm.py. A checkpoint can be used with another number of stages.

Order: a dataset from make_text.py, learning rate 0.003, batch size 16 (a multiple of 4), 1 to 4 ranks in all.
"""

import sys

import charlm
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

MICROBATCHES_PER_STAGE = 4
"""With more microbatches, ranks idle less while the pipeline fills and drains."""


def keep_stage(model, rank, stages):
    """Remove all layers but this rank's from the model; return the numbers of this rank's blocks."""
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
    if charlm.TOTAL_BATCH_SIZE % microbatches:
        sys.exit(f"The batch size must be a multiple of {MICROBATCHES_PER_STAGE}: it is split into microbatches.")
    model = charlm.build_model().to(device)
    blocks = [None] * stages
    dist.all_gather_object(blocks, keep_stage(model, rank, stages))
    charlm.print_once(f"blocks of each stage: {blocks}")
    stage = PipelineStage(model, rank, stages, device)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=charlm.cross_entropy)

    # Every rank calls `step` and `score` with the whole batch. The first stage uses the inputs, the last the targets.

    def select(inputs, targets):
        arguments = [inputs] if stage.is_first else []
        return arguments, targets if stage.is_last else None

    def step(inputs, targets):
        arguments, target = select(inputs, targets)
        losses = []
        schedule.step(*arguments, target=target, losses=losses)
        return sum(losses) / microbatches if stage.is_last else None

    def score(inputs, targets):
        arguments, target = select(inputs, targets)
        return schedule.eval(*arguments, target=target)

    # (0, 1): batches are not divided into parts, because all ranks work on the same sequences.
    charlm.train(model, step, score, (0, 1), device)


if __name__ == "__main__":
    main()
