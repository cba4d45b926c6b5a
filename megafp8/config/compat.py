"""The table of Megatron-LM flags that are not fields of ours, and of fields whose feature is still to come.

Data only, apart from `check` at the end. To bring a feature: delete its lines in NOT_YET and NOT_YET_FIELDS and add
fields for the flags. Prefixes of whole families that are out of scope are in OUT_OF_SCOPE.
"""

from collections.abc import Sequence

from megafp8.config.config import Config, field_table, flag_of, has_flag
from megafp8.config.flags import spec_of
from megafp8.config.verdict import Foreign, Kind, NotYetField, accepted, not_yet, refused

ACCEPTED = (
    *accepted("there is one implementation of the model", "--transformer-impl X", "--use-mcore-models"),
    *accepted("attention is PyTorch's scaled_dot_product_attention", "--attention-backend X", "--use-flash-attn"),
    *accepted("attention scores are always FP32", "--attention-softmax-in-fp32", "--apply-query-key-layer-scaling"),
    *accepted("masks are never materialized", "--no-create-attention-mask-in-dataloader"),
    *accepted(
        "fusion is chosen here, with the same numbers",
        "--no-bias-swiglu-fusion",
        "--no-bias-dropout-fusion",
        "--no-rope-fusion",
        "--no-masked-softmax-fusion",
        "--no-persist-layer-norm",
        "--cross-entropy-loss-fusion",
        "--cross-entropy-fusion-impl X",
        "--use-te-activation-func",
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        "--moe-router-fusion",
    ),
    *accepted(
        "weight gradients are always added up in FP32",
        "--no-gradient-accumulation-fusion",
        "--accumulate-allreduce-grads-in-fp32",
    ),
    *accepted("the loss is always the mean over all valid tokens", "--calculate-per-token-loss"),
    *accepted("gradients are summed and divided once", "--ddp-average-in-collective"),
    *accepted(
        "there is one checkpoint format, which any layout loads",
        "--ckpt-format X",
        "--use-dist-ckpt",
        "--auto-detect-ckpt-format",
        "--dist-ckpt-optim-fully-reshardable",
        "--ckpt-assume-constant-structure",
        "--ckpt-fully-parallel-save",
        "--no-ckpt-fully-parallel-save",
        "--ckpt-fully-parallel-load",
    ),
    *accepted(
        "it only picks how --async-save works inside",
        "--use-persistent-ckpt-worker",
        "--async-strategy X",
        "--async-ckpt-use-cpu-shm",
    ),
    *accepted(
        "it is always logged",
        "--log-validation-ppl-to-tensorboard",
        "--log-memory-to-tensorboard",
        "--log-batch-size-to-tensorboard",
    ),
    *accepted("checksums are always written and checked", "--verify-integrity"),
    *accepted(
        "slow ranks are always named",
        "--log-straggler",
        "--disable-straggler-on-startup",
        "--straggler-ctrlr-port X",
        "--straggler-minmax-count X",
    ),
    *accepted("--profile brings them", "--nvtx-ranges"),
    *accepted("log lines are few and always written", "--logging-level X", "--tensorboard-queue-size X"),
    *accepted("non-finite steps are always found, skipped and counted", "--no-check-for-nan-in-loss-and-grad"),
    *accepted("data is always memory-mapped", "--no-mmap-bin-files"),
    *accepted("memory and garbage are managed here", "--manual-gc", "--manual-gc-interval X", "--no-manual-gc-eval"),
    *accepted("the allocator keeps its memory", "--empty-unused-memory-level X"),
    *accepted("nothing here is behind such a switch", "--enable-experimental"),
    *accepted("random states have one implementation", "--te-rng-tracker", "--use-cpu-initialization"),
    *accepted("process groups are made as needed", "--disable-gloo-process-groups"),
    *accepted("NCCL chooses its buffers", "--use-nccl-ub"),
    *accepted("--position-embedding-type decides", "--no-position-embedding"),
    *accepted("it shapes Muon's shards only", "--no-use-layer-wise-param-layout"),
    *accepted("SIGTERM always saves and ends the run", "--exit-signal-handler"),
    *accepted(
        "there is no loss scaling in BF16 and FP8",
        "--loss-scale X",
        "--initial-loss-scale X",
        "--min-loss-scale X",
        "--loss-scale-window X",
        "--hysteresis X",
        "--no-log-loss-scale-to-tensorboard",
    ),
    *accepted("scales are updated every step", "--fp8-interval X"),
    *accepted(
        "messages between stages always overlap with work",
        "--overlap-p2p-communication-warmup-flush",
        "--no-overlap-p2p-communication",
    ),
    *accepted(
        "it changes no number; --pipeline-schedule zero-bubble defers weight gradients",
        "--defer-embedding-wgrad-compute",
        "--wgrad-deferral-limit X",
    ),
)

_FSDP = "shards parameters over data-parallel ranks; use --use-distributed-optimizer (ZeRO-1)"
_OFFLOAD = "moves activations to host memory; use --recompute-granularity selective or full"
_OPTIMIZER_OFFLOAD = "keeps optimizer state in host memory; use --use-distributed-optimizer"
_HIERARCHICAL = "splits context parallelism in two levels; use --cp-comm-type p2p or all_gather"
_MUON = "belongs to the Muon optimizer; use --optimizer adam"

REFUSED = (
    *refused("trains in FP16 with loss scaling, which is not here; use --bf16", "--fp16"),
    *refused("is the old spelling; use --fp8-format hybrid", "--fp8-hybrid"),
    *refused("is the old spelling; use --fp8-format e4m3", "--fp8-e4m3"),
    *refused("runs weight gradients in BF16; use --keep-modules-in-bf16 for whole linears", "--no-fp8-wgrad"),
    *refused("is the old spelling; use --tensor-model-parallel-size", "--model-parallel-size X"),
    *refused("is the old spelling; use --micro-batch-size", "--batch-size X"),
    *refused("is the old spelling; use --lr-warmup-fraction", "--warmup X"),
    *refused("is the old spelling; use --recompute-granularity full", "--checkpoint-activations"),
    *refused("is the old spelling; use --cuda-graph-impl local", "--enable-cuda-graph", "--external-cuda-graph"),
    *refused("is another project's spelling; use --qk-head-dim", "--qk-nope-head-dim X"),
    *refused("is another project's spelling; use --qk-pos-emb-head-dim", "--qk-rope-head-dim X"),
    *refused(
        "picks a tokenizer of another project; use --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR",
        "--patch-tokenizer-type X",
    ),
    *refused(
        _FSDP,
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--fsdp-double-buffer",
        "--init-model-with-meta-device",
        "--megatron-fsdp-main-params-dtype X",
        "--megatron-fsdp-main-grads-dtype X",
        "--megatron-fsdp-grad-comm-dtype X",
        "--keep-fp8-transpose-cache",
    ),
    *refused(_FSDP, "--data-parallel-sharding-strategy X", "--outer-dp-sharding-strategy X", harmless=["no_shard"]),
    *refused(
        "keeps several copies of the sharded optimizer; use --use-distributed-optimizer, one copy over all ranks",
        "--num-distributed-optimizer-instances X",
        harmless=["1"],
    ),
    *refused(_OFFLOAD, "--cpu-offloading", "--fine-grained-activation-offloading", "--offload-modules X..."),
    *refused(_OFFLOAD, "--cpu-offloading-num-layers X", harmless=["0"]),
    *refused(
        _OPTIMIZER_OFFLOAD, "--optimizer-cpu-offload", "--optimizer-offload-policy X", "--overlap-cpu-optimizer-d2h-h2d"
    ),
    *refused(_OPTIMIZER_OFFLOAD, "--optimizer-offload-fraction X", harmless=["0", "0.0"]),
    *refused(_MUON, "--muon-momentum X", "--muon-scale-mode X", "--muon-extra-scale-factor X"),
    *refused(
        "writes TensorBoard points between log lines; use --log-interval",
        "--tensorboard-log-interval X",
        harmless=["1"],
    ),
    *refused(_HIERARCHICAL, "--hierarchical-context-parallel-sizes X..."),
    *refused(
        "recomputes layers of experts; use --recompute-granularity selective --recompute-modules moe",
        "--moe-layer-recompute",
    ),
    *refused(
        "writes a Chakra graph, which is not here; --profile's trace has every operator and kernel",
        "--pytorch-profiler-collect-chakra",
    ),
    *refused("runs the model of before Megatron-Core, which is not here; leave it out", "--use-legacy-models"),
)

NOT_YET = (
    *not_yet(
        "tokens of one microbatch sent behind the work of another",
        "--overlap-moe-expert-parallel-comm",
        needs_ranks=True,
    ),
    *not_yet("another order of ranks", "--use-tp-pp-dp-mapping", needs_ranks=True),
    *not_yet("gather overlapped with the update", "--overlap-param-gather-with-optimizer-step", needs_ranks=True),
    *not_yet("comparison of weights over ranks", "--check-weight-hash-across-dp-replicas-interval X", needs_ranks=True),
    *not_yet("a batch size of its own for evaluation", "--eval-global-batch-size X"),
    *not_yet("flags read from a checkpoint", "--use-checkpoint-args"),
)

NOT_YET_FIELDS: tuple[NotYetField, ...] = ()

FOREIGN: tuple[Foreign, ...] = (*ACCEPTED, *REFUSED, *NOT_YET)

OUT_OF_SCOPE = {
    "inference": ("--inference-", "--max-tokens-to-oom", "--flash-decode"),
    "reinforcement learning": ("--rl-", "--grpo-", "--langrl-", "--perform-rl-step"),
    "vision and other modalities": ("--vision-", "--img-", "--patch-dim", "--dino-", "--swin-", "--num-channels"),
    "distillation and post-training": ("--export-", "--kd-", "--distill-", "--teacher-", "--sft"),
    "BERT, T5, retrieval": ("--bert-", "--biencoder-", "--ict-", "--retro-", "--retriever-", "--encoder-", "--mask-"),
    "state-space models": ("--hybrid-", "--mamba-", "--is-hybrid-model"),
    "FP4": ("--fp4-",),
}


def check(config: Config, foreign: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Returns a log line per flag that was accepted without effect.

    Args:
        config: resolved configuration.
        foreign: flags without a field, as given, each with its values.

    Raises:
        ValueError: flags are refused, or belong to features that are still to come (all such flags in one line).
    """
    table = {entry.flag: entry for entry in FOREIGN}
    notes: list[str] = []
    refusals: list[str] = []
    missing: dict[str, list[str]] = {}
    for flag, values in foreign:
        entry, shown = table[flag], " ".join((flag, *values))
        if entry.is_harmless(values, config.parallel.world_size):
            notes.append(f"{shown}: accepted without effect ({_why(entry)})")
        elif entry.kind == "refused":
            refusals.append(f"{shown}: {entry.text}")
        else:
            missing.setdefault(entry.text, []).append(shown)
    for field in NOT_YET_FIELDS:
        value = config.value(field.name)
        if has_flag(field.name) and not config.is_given(field.name):
            continue  # derived from another flag, which is named instead
        if not field.is_harmless(value, config.parallel.world_size):
            missing.setdefault(field.feature, []).append(_shown(field.name, value))
        elif field.needs_ranks and value:
            notes.append(f"{flag_of(field.name)}: accepted without effect (one process)")
    if refusals:
        raise ValueError("; ".join(refusals))
    if missing:
        features = "; ".join(f"{feature} ({' '.join(flags)})" for feature, flags in missing.items())
        raise ValueError(f"not yet in megafp8: {features}; leave these out")
    return notes


def verdict(flag: str) -> Kind | None:
    """Returns what becomes of a flag: "supported", "accepted", "refused" or "not yet"; None when it isn't known."""
    for name in field_table():
        if has_flag(name) and flag in (flag_of(name), *spec_of(field_table()[name][1]).aliases):
            return "not yet" if any(entry.name == name for entry in NOT_YET_FIELDS) else "supported"
    return next((entry.kind for entry in FOREIGN if entry.flag == flag), None)


def out_of_scope(flag: str) -> str | None:
    """Returns the field of work that an unknown flag belongs to when it is out of scope here."""
    return next((what for what, starts in OUT_OF_SCOPE.items() if flag.startswith(starts)), None)


def _why(entry: Foreign) -> str:
    if entry.kind == "accepted":
        return entry.text
    return "one process" if entry.needs_ranks else "this value changes nothing"


def _shown(name: str, value: object) -> str:
    if not has_flag(name):
        return f"{name.upper()}={value}"  # from the environment
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"
