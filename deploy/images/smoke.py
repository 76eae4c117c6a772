"""One collective in the framework that this run was started for: what an image must be able to do.

Every rank gives its number plus one, and must hear the sum over all ranks. Exits with an error otherwise.
"""

import os

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if "TF_CONFIG" in os.environ:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def give():
        """This rank's number, as the strategy wants it: from inside a replica."""
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(rank + 1.0))

    total = float(strategy.run(tf.function(give)))
elif "HOROVOD_CONTROLLER" in os.environ:
    try:
        import horovod.torch as hvd
        from torch import tensor
    except ImportError:
        import horovod.tensorflow as hvd
        from tensorflow import constant as tensor
    hvd.init()
    if (hvd.rank(), hvd.size()) != (rank, size):
        raise SystemExit(f"rank {rank} of {size}: Horovod calls itself rank {hvd.rank()} of {hvd.size()}")
    total = float(hvd.allreduce(tensor([rank + 1.0]), op=hvd.Sum, name="smoke")[0])
else:
    import torch
    import torch.distributed as dist

    dist.init_process_group(os.environ["BACKEND"])
    given = torch.tensor([rank + 1.0])
    dist.all_reduce(given)
    total = float(given[0])
    dist.destroy_process_group()
if total != size * (size + 1) / 2:
    raise SystemExit(f"rank {rank}: the ranks' numbers add up to {total}")
print(f"rank {rank} of {size}: the collective works", flush=True)
