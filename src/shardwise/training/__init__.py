"""Training runs: built-in tasks, schedules, the loop of a rank, and `train` from Python."""

from shardwise.training.run import Run, execute, train
from shardwise.training.schedules import make_schedule, scaled_lr

__all__ = ["Run", "execute", "make_schedule", "scaled_lr", "train"]
