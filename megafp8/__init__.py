"""megafp8: GPT pretraining in FP8.

`megafp8.fp8` holds the numerics and serves people's own modules; `pretrain_gpt.py` is the training entry point.
"""

__version__ = "0.1.0"
