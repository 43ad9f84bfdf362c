import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(autouse=True)
def seeded():
    torch.set_num_threads(1)  # the suite runs one process per core; accelerate sets it anew where it finds ranks
    torch.manual_seed(0)
