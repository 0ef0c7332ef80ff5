"""Expert parallelism: modules of experts found by trial, tokens exchanged, gradients reduced by who holds what."""

from shardwise.parallel.expert.expert_forward import ExpertParallel, install
from shardwise.parallel.expert.find import find_experts, find_row_wise, holds_experts
from shardwise.parallel.expert.reduce import WithExperts

__all__ = ["ExpertParallel", "WithExperts", "find_experts", "find_row_wise", "holds_experts", "install"]
