"""`PRECISIONS`: the dtypes of each precision, for plans, runs, proofs, forecasts. A new one: here and costs/software.

| precision | compute | master and optimizer state | gradients summed in |
|---|---|---|---|
| fp32 | float32 | float32 | float32 |
| fp64 | float64 | float64 | float64 |
| bf16 | bfloat16 | float32 | float32 |
| bf16-full | bfloat16 | bfloat16 | float32 |
| fp16 | float16, with a loss scaler | float32 | float32 |
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one precision, by their short names, such as "bf16" (keys of `TORCH`).

    compute  dtype of the module's weights, of activations and of matrix products
    master   dtype of the master weights and of the optimizer's state
    scaled   Whether the loss is scaled against underflow, and a step with an overflow is skipped
    also     names of the precision in other libraries
    """

    compute: str
    master: str
    scaled: bool = False
    also: tuple[str, ...] = ()

    @property
    def summed(self) -> str:
        """Returns the dtype in which gradients are summed over ranks, unless the plan names one."""
        return "fp64" if self.compute == "fp64" else "fp32"

    @property
    def products(self) -> str:
        """Returns the dtype whose FLOP rate a forecast uses for matrix products, "bf16" for 16 bits, else "fp32"."""
        return "bf16" if BYTES[self.compute] == 2 else "fp32"


TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}  # torch's names
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
PRECISIONS: dict[str, Dtypes] = {
    "fp32": Dtypes("fp32", "fp32"),
    "fp64": Dtypes("fp64", "fp64"),
    "bf16": Dtypes("bf16", "fp32", also=("bf16-mixed",)),
    "bf16-full": Dtypes("bf16", "bf16", also=("bf16-true",)),
    "fp16": Dtypes("fp16", "fp32", scaled=True, also=("fp16-mixed",)),
}
