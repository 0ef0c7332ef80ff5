"""Training runs: built-in tasks, learning-rate schedules, the loop of a rank, and `train` from Python."""

from shardwise.training.learning_rates import make_schedule, scaled_lr
from shardwise.training.run import Run, execute, train

__all__ = ["Run", "execute", "make_schedule", "scaled_lr", "train"]
