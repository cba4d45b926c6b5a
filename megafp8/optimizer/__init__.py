"""Gradient buffers, AdamW on FP32 masters, norms and clipping, and the schedule of learning rate and decay."""

from megafp8.optimizer.buffers import GradBuffers
from megafp8.optimizer.layout import Group
from megafp8.optimizer.optimizer import AdamWOptions, Optimizer, StepStats, build_optimizer
from megafp8.optimizer.schedule import Schedule, build_schedule, resume_schedule, schedule_to_json
from megafp8.optimizer.sharding import Sharding
from megafp8.optimizer.weights import ModelWeights

__all__ = [
    "AdamWOptions",
    "GradBuffers",
    "Group",
    "ModelWeights",
    "Optimizer",
    "Schedule",
    "Sharding",
    "StepStats",
    "build_optimizer",
    "build_schedule",
    "resume_schedule",
    "schedule_to_json",
]
