"""All cross-checks, in one place."""


def check_given(config):
    for name in ("num_layers", "hidden_size", "num_attention_heads", "micro_batch_size", "seq_length", "lr"):
        if config.value(name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is required")


def check(config):
    pass


def check_files(config):
    pass
