"""Expert parallelism: find modules of experts by trials, exchange tokens, reduce gradients over an expert's holders."""

from shardwise.parallel.expert.expert_forward import ExpertParallel, install
from shardwise.parallel.expert.find import find_experts, find_row_wise, holds_experts
from shardwise.parallel.expert.reduce import WithExperts

__all__ = ["ExpertParallel", "WithExperts", "find_experts", "find_row_wise", "holds_experts", "install"]
