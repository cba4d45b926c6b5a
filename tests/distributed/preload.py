"""What the pool's server imports once, so that every worker starts with it."""

import pytest  # noqa: F401
import torch.distributed
import torch.distributed.device_mesh
import torch.utils.tensorboard  # noqa: F401

import megafp8.parallel
import megafp8.training.trainer  # noqa: F401
