"""The parts of a transformer: norm, rotary embedding, attention, MLP, layer, block."""
