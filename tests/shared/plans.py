"""Plans for made-up document lengths."""

import numpy as np
from training import arguments

from trl_packfa.data.dataset import Tokens
from trl_packfa.packing import TrainedTokens
from trl_packfa.plan.gather import Source
from trl_packfa.plan.run import make_plan

UNEVEN = [int(n) for n in np.exp(np.random.default_rng(0).normal(3.5, 0.9, 300)).clip(2, 400)]


def source(lengths=UNEVEN):
    lengths = np.array(lengths, dtype=np.int64)
    return Source("lengths", Tokens(lengths, TrainedTokens.every(int(lengths.sum()))))


def made(tmp_path, lengths=UNEVEN, ranks=(1, 4), shape=None, **options):
    options = {"max_steps": -1, "num_train_epochs": 1, "max_length": 200, "gradient_checkpointing": True, **options}
    args = arguments(out=tmp_path, **options)
    return make_plan(source(lengths), args, list(ranks), shape)
