"""Flags of Megatron-LM scripts that have no field here. Filled in below as data."""

FOREIGN = ()


def check(config, foreign):
    return []
