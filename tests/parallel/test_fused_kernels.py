"""A ring's blocks through a GPU's fused kernels: their signatures, what they are given and how it is merged.

No GPU is needed: functions with the kernels' signatures stand in for them, which torch's own schemas check.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import test_sequence
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from shardwise.parallel.sequence import block_attention, fused_kernels
from shardwise.ranks import RankPool

NAMES = {
    SDPBackend.FLASH_ATTENTION: "_scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "_scaled_dot_product_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "_scaled_dot_product_cudnn_attention",
}
assert NAMES.keys() == fused_kernels.KERNELS.keys()


def weights_of(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = torch.einsum("bhsd,bhtd->bhst", q, k) * scale
    below = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return torch.where(below, scores, -torch.inf) if is_causal else scores


class StandIn:
    """Has the operations of one kernel: `torch.ops.aten` for `fused_kernels`. Counts calls, and keeps their dtypes."""

    def __init__(self, kind: SDPBackend):
        self.kind, self.calls, self.dtypes = kind, [0, 0], set()

    def __getattr__(self, name: str) -> Any:
        schema = getattr(torch.ops.aten, name).default._schema
        backward = name.endswith("_backward")
        assert name == NAMES[self.kind] + ("_backward" if backward else "")

        def call(*args: Any, **kwargs: Any) -> Any:
            named = dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | kwargs
            assert named.keys() <= {argument.name for argument in schema.arguments}
            assert len(named) == len(args) + len(kwargs) and not named.get("dropout_p")
            self.calls[backward] += 1
            self.dtypes |= {named["query"].dtype}
            return self.backward(named) if backward else self.forward(named)

        return call

    def forward(self, named: dict[str, Any]) -> tuple:
        scores = weights_of(named["query"], named["key"], named["is_causal"], named["scale"])
        lse = torch.logsumexp(scores, -1).to(block_attention.wide(scores.dtype))
        output = torch.softmax(scores, -1) @ named["value"]
        if self.kind == SDPBackend.EFFICIENT_ATTENTION:
            lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        return output, lse.unsqueeze(-1) if self.kind == SDPBackend.CUDNN_ATTENTION else lse, *[None] * 7

    def backward(self, named: dict[str, Any]) -> tuple:
        q, k, v, out, lse = (named[name] for name in ("query", "key", "value", "out", "logsumexp"))
        gradient = named.get("grad_out", named.get("grad_out_"))
        rows = q.shape[-2]
        wanted = {SDPBackend.EFFICIENT_ATTENTION: (*q.shape[:2], -(-rows // 32) * 32)}
        assert lse.is_contiguous() and lse.shape == wanted.get(self.kind, (*q.shape[:3], 1)[: lse.dim()])
        assert lse.dim() == (4 if self.kind == SDPBackend.CUDNN_ATTENTION else 3)
        lse = lse.reshape(*q.shape[:2], -1)
        assert lse[..., rows:].isposinf().all(), "rows that are not there have weights of zero"
        lse = lse[..., :rows]
        weights = (weights_of(q, k, named["is_causal"], named["scale"]) - lse.unsqueeze(-1)).exp().to(q.dtype)
        of_weights = torch.einsum("bhsd,bhtd->bhst", gradient, v) - (gradient * out).sum(-1, keepdim=True)
        of_scores = weights * of_weights * named["scale"]
        dv = torch.einsum("bhst,bhsd->bhtd", weights, gradient)
        dq, dk = torch.einsum("bhst,bhtd->bhsd", of_scores, k), torch.einsum("bhst,bhsd->bhtd", of_scores, q)
        return (dq, dk, dv, None) if self.kind == SDPBackend.EFFICIENT_ATTENTION else (dq, dk, dv)


@contextmanager
def standing_in(kind: SDPBackend) -> Iterator[StandIn]:
    """Context: blocks of a ring take this kernel, as on a GPU, for which functions on the CPU stand in."""
    kept = fused_kernels._ATEN, fused_kernels.on_host, fused_kernels.torchs_choice
    fused_kernels._ATEN = stand_in = StandIn(kind)
    fused_kernels.on_host, fused_kernels.torchs_choice = lambda device: False, lambda *_: kind
    try:
        yield stand_in
    finally:
        fused_kernels._ATEN, fused_kernels.on_host, fused_kernels.torchs_choice = kept


def around_a_ring(number: int, seed: int) -> tuple[list[tuple[dict, float]], list[int]]:
    with standing_in(SDPBackend(number)) as stand_in:  # which is not pickled
        return test_sequence._attention(seed, 30), stand_in.calls


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.name.lower())
def test_a_ring_through_a_kernel_of_a_gpu_is_equal_in_float64(kind: SDPBackend, pool: RankPool) -> None:
    seed = random.randrange(2**31)
    for errors, calls in pool.run(around_a_ring, 2, kind.value, seed, timeout_s=240):
        wrong = [(case, off) for case, off in errors if not off < test_sequence.BAR]
        assert not wrong, f"seed {seed}: {wrong[:3]}"
        assert min(calls) > 0


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.name.lower())
def test_a_kernel_is_given_16_bits_and_is_within_their_rounding(kind: SDPBackend) -> None:
    draws = torch.Generator().manual_seed(0)
    q, k, v, gradient = (torch.randn(2, 3, 37, 8, generator=draws, dtype=torch.bfloat16) for _ in range(4))
    exact = [tensor.double() for tensor in (q, k, v)]
    out, lse = block_attention.attended(*exact, None, True, 0.3)
    of_exact = block_attention.gradients(gradient.double(), *exact, out, lse, None, True, 0.3, False)
    with standing_in(kind) as stand_in:
        mine, mine_lse = block_attention.attended(q, k, v, None, True, 0.3)
        of_mine = block_attention.gradients(gradient, q, k, v, mine, mine_lse, None, True, 0.3, False)
    assert stand_in.dtypes == {torch.bfloat16} and stand_in.calls == [1, 1]
    assert mine.dtype == mine_lse.dtype == torch.float32
    for narrow, wide in zip([mine, *of_mine[:3]], [out, *of_exact[:3]], strict=True):
        assert float((narrow.double() - wide).norm() / wide.norm()) < 2**-6


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.name.lower())
def test_torch_takes_what_the_kernels_are_called_with(kind: SDPBackend) -> None:
    kernel = fused_kernels.KERNELS[kind]
    q, k, v = (torch.empty(2, 3, rows, 8, device="meta", dtype=torch.bfloat16) for rows in (37, 21, 21))
    output, lse = kernel.forward(q, k, v, False, 0.3)
    assert output.shape == q.shape and lse.shape == q.shape[:3]
    grads = kernel.backward(output, q, k, v, output, lse.contiguous(), False, 0.3)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_blocks_that_no_kernel_of_a_gpu_takes() -> None:
    """Ragged diagonals, values of another width, blocks without rows, and what torch itself would compute unfused."""
    q, k, v = (torch.zeros(1, 2, 6, 8, dtype=torch.bfloat16) for _ in range(3))
    with standing_in(SDPBackend.FLASH_ATTENTION):
        assert fused_kernels.kernel_for(q, k, v, True, 1.0) is not None
        assert fused_kernels.kernel_for(q[:, :, :3], k, v, False, 1.0) is not None
        assert fused_kernels.kernel_for(q[:, :, :3], k, v, True, 1.0) is None
        assert fused_kernels.kernel_for(q, k, v[..., :4], False, 1.0) is None
        assert fused_kernels.kernel_for(q[:, :, :0], k, v, False, 1.0) is None
    with standing_in(SDPBackend.MATH):
        assert fused_kernels.kernel_for(q, k, v, True, 1.0) is None
