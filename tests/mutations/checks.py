"""What a proof of steps does not see: files that go out of a run, read by others. Each returns an error by what it is.

Run on ranks with a bug in place, as `check:FUNCTION` in the place of a task; without it all errors are below `BAR`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import adapter_tasks
import torch
from torch import nn

from shardwise import parallelize
from shardwise.hf import export, save_adapters

BAR = 1e-5  # relative, in float32


def adapters_out() -> dict[str, float]:
    """Logits of a trained model against those of its adapters as peft loads them, and of the merged folder."""
    import peft
    import transformers

    engine = parallelize(adapter_tasks.configured(), "single")
    for step in range(2):
        engine.step(engine.task.batch(step))
    with tempfile.TemporaryDirectory() as home:
        adapter = save_adapters(engine, Path(home) / "adapter")
        merged = export(adapter, Path(home) / "merged", adapter_tasks.small_llama(), merge=True)
        base = transformers.AutoModelForCausalLM.from_pretrained(str(adapter_tasks.small_llama()))
        models = {
            "logits of the adapters": peft.PeftModel.from_pretrained(base, str(adapter)),
            "logits of the merged folder": transformers.AutoModelForCausalLM.from_pretrained(str(merged)),
        }
        own = _logits(engine.module)
        errors = {name: float((_logits(model) - own).abs().max() / own.abs().max()) for name, model in models.items()}
    engine.close()
    return errors


@torch.no_grad()
def _logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(adapter_tasks.architectures.words(9)["input_ids"]).logits
