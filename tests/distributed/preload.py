"""What the pool's server imports once, so that every worker starts with it."""

import torch.distributed
import torch.distributed.device_mesh  # noqa: F401

import megafp8.parallel  # noqa: F401
