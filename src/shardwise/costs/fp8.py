"""Recipes of products in FP8 and FP4: how their inputs are scaled and cast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fp8:
    """A recipe for matrix products in FP8 or FP4.

    A cast reads an element in bf16 and writes it twice, by rows and by columns, because products need the dim over
    which they contract to be contiguous.
    """

    suffix: str  # added to a software's name
    cast_bytes: float  # bytes moved for each element that is scaled and cast
    source: str  # how inputs are scaled, for people
    cast_kernels: int = 1  # kernels of one cast
    bits: int = 8  # of an element

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
    # read (2 bytes) for the largest value, read again (2), written twice: half a byte and 1/16 byte of scale each
    "blocks of 16": Fp8(
        "-nvfp4", 2 + 2 + 2 * (1 / 2 + 1 / 16), "scaled by its own largest value and by blocks of 16 (NVFP4)", 3, bits=4
    ),
}
