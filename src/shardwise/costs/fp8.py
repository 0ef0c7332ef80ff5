"""Recipes of products in FP8 and FP4: how their inputs are scaled and cast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fp8:
    """A recipe: what follows a software's name, bytes for an element that is scaled and cast, kernels of a cast, bits.

    Each is read in bf16 and written twice, along rows and along columns: products contract over neighbours in memory.
    """

    suffix: str  # of a software's name
    cast_bytes: float  # moved for each element that is scaled and cast
    source: str  # how inputs are scaled, in words
    cast_kernels: int = 1
    bits: int = 8

    @property
    def name(self) -> str:
        """Returns "FP8" or "FP4"."""
        return f"FP{self.bits}"


FP8: dict[str, Fp8] = {
    "current": Fp8("-fp8", 6, "scaled by its own largest value, which takes a pass of its own (torchao tensorwise)", 3),
    "delayed": Fp8(
        "-fp8-delayed", 4, "scaled by the largest value of earlier steps (Transformer Engine's first recipe)"
    ),
    "blocks": Fp8("-mxfp8", 4, "scaled block by block in the pass that casts (MXFP8)"),
    # read for the largest value, read again; half a byte and a scale for each 16 elements, twice
    "blocks of 16": Fp8(
        "-nvfp4", 2 + 2 + 2 * (1 / 2 + 1 / 16), "scaled by its own largest value and by blocks of 16 (NVFP4)", 3, bits=4
    ),
}
