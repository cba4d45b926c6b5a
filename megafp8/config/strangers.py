"""What people type who come from other trainers, and what it is called here.

Only flags that nobody here knows get this far: Megatron-LM's are in compat.py.
"""

import re

_LAUNCH = "torchrun's: torchrun --nproc-per-node N --nnodes M pretrain_gpt.py ..., before the script's name"
_ZERO = "DeepSpeed is not used here: --use-distributed-optimizer shards the optimizer (ZeRO-1)"
_HUB = "tools/convert_checkpoint.py from-hf makes a checkpoint of a model, and --load DIR --finetune starts from it"
_TEXT = "tools/preprocess_data.py makes token files of text, and --data-path takes their prefix"

# flag, without dashes in front and with - for _  ->  the mend
MENDS = {
    **dict.fromkeys(("deepspeed", "deepspeed-config", "zero-stage", "zero", "zero-optimization"), _ZERO),
    **dict.fromkeys(("fsdp", "fsdp-config", "fsdp-transformer-layer-cls-to-wrap"), _ZERO.replace("DeepSpeed", "FSDP")),
    **dict.fromkeys(("deepspeed-activation-checkpointing", "activation-checkpointing", "gradient-checkpointing"),
                    "give --recompute-granularity full, or selective"),
    **dict.fromkeys(("nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "num-gpus", "gpus"),
                    f"is {_LAUNCH}"),
    **dict.fromkeys(("local-rank", "rank", "world-size"), "torchrun sets it in the environment; leave it out"),
    **dict.fromkeys(("per-device-train-batch-size", "train-micro-batch-size-per-gpu", "train-micro-batch-size"),
                    "give --micro-batch-size, the samples that a rank computes at once"),
    **dict.fromkeys(("train-batch-size", "global-batch"), "give --global-batch-size, and --micro-batch-size of a rank"),
    **dict.fromkeys(("gradient-accumulation-steps", "grad-accum-steps"),
                    "follows from --global-batch-size / (--micro-batch-size x data-parallel ranks); give that one"),
    "learning-rate": "give --lr",
    **dict.fromkeys(("warmup-steps", "num-warmup-steps"), "give --lr-warmup-iters"),
    "warmup-ratio": "give --lr-warmup-fraction",
    **dict.fromkeys(("lr-scheduler-type", "lr-scheduler"), "give --lr-decay-style"),
    **dict.fromkeys(("max-steps", "num-steps", "steps", "max-iters"), "give --train-iters"),
    **dict.fromkeys(("num-train-epochs", "epochs", "num-epochs"),
                    "give --train-iters or --train-samples; data is repeated until they suffice"),
    **dict.fromkeys(("block-size", "max-seq-length", "max-seq-len", "context-length", "seq-len", "sequence-length"),
                    "give --seq-length"),
    **dict.fromkeys(("model-name-or-path", "model", "pretrained", "pretrained-model"), _HUB),
    **dict.fromkeys(("dataset", "dataset-name", "train-file", "train-data", "data"), _TEXT),
    **dict.fromkeys(("output-dir", "out-dir"), "give --save for checkpoints and --log-dir for logs"),
    **dict.fromkeys(("resume", "resume-from-checkpoint"), "give --load DIR; the newest checkpoint there is taken"),
    **dict.fromkeys(("save-steps", "checkpoint-interval"), "give --save-interval"),
    "logging-steps": "give --log-interval",
    "eval-steps": "give --eval-interval",
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size", "tensor-parallel"), "give --tensor-model-parallel-size"),
    **dict.fromkeys(("pp", "pp-size", "pipeline-parallel-size", "pipeline-parallel"),
                    "give --pipeline-model-parallel-size"),
    **dict.fromkeys(("ep", "expert-parallel-size"), "give --expert-model-parallel-size"),
    **dict.fromkeys(("dp", "dp-size", "data-parallel-size"), "follows from the number of processes; leave it out"),
    **dict.fromkeys(("fp8", "float8", "enable-fp8", "fp8-training"), "give --bf16 --fp8-format e4m3, or hybrid"),
    **dict.fromkeys(("dtype", "precision", "mixed-precision"), "give --bf16, and for FP8 --fp8-format too"),
    **dict.fromkeys(("mxfp8", "use-mxfp8"), "give --bf16 --fp8-format e4m3 --fp8-recipe mxfp8"),
    "report-to": "TensorBoard events go to --log-dir; --wandb-project adds W&B",
}  # fmt: skip


# what word processors, web pages and chats make of two hyphens
_DASHES = re.compile("[\u2010-\u2015\u2212]+-?(?=[A-Za-z])|-[\u2010-\u2015\u2212]+(?=[A-Za-z])")


def pasted_dash(text: str) -> str | None:
    """The line for a flag whose hyphens became another dash where it was copied from; None for any other text."""
    found = _DASHES.match(text)
    return found and f"unexpected argument '{text}': its dash is none of a keyboard's; type --{text[found.end() :]}"


def mend_for(flag: str) -> str | None:
    """What to give instead of an unknown flag of another trainer; None when it isn't one of those."""
    return MENDS.get(flag.lstrip("-").replace("_", "-").lower())
