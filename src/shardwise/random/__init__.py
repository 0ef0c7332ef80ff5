"""Random numbers inside a module that do not depend on the plan, each hashed from its element's global index."""

from shardwise.random.dims import BatchDims, Drawn
from shardwise.random.draws import DRAWS
from shardwise.random.follow_draws import HIDDEN, Randomness, Watch
from shardwise.random.hashing import WITHOUT, has_kernel, hashed
from shardwise.random.modes import EACH_ITS_OWN, ConstantRandom, GlobalRandom, Samples, draws

__all__ = [
    "DRAWS", "EACH_ITS_OWN", "HIDDEN", "WITHOUT", "BatchDims", "ConstantRandom", "Drawn", "GlobalRandom", "Randomness",
    "Samples", "Watch", "draws", "has_kernel", "hashed",
]  # fmt: skip
