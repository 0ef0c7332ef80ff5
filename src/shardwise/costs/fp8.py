"""Recipes of products in FP8: how their inputs are scaled and cast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fp8:
    """A recipe of FP8: what follows a software's name, bytes for an element that is scaled and cast, kernels of a cast.

    Each is read in bf16 and written twice, along rows and along columns: products contract over neighbours in memory.
    """

    suffix: str
    cast_bytes: float
    source: str
    cast_kernels: int = 1


FP8: dict[str, Fp8] = {
    "current": Fp8("-fp8", 6, "scaled by its own largest value, which takes a pass of its own (torchao tensorwise)", 3),
    "delayed": Fp8(
        "-fp8-delayed", 4, "scaled by the largest value of earlier steps (Transformer Engine's first recipe)"
    ),
    "blocks": Fp8("-mxfp8", 4, "scaled block by block in the pass that casts (MXFP8)"),
}
