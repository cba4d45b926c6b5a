"""Formulas for a run's size, from its configuration alone: parameters, memory, FLOPs.

Used by `--dry-run` and by the throughput in the log. Nothing is allocated and no GPU is asked.
"""
