"""Layers whose weights are cut over the tensor-parallel axis, and random numbers that don't depend on state."""
