"""What a proof of steps does not see: files that go out of a run, and rows of examples. Each returns errors by name.

Run on ranks with a bug in place, as `check:FUNCTION` in the place of a task; without it all errors are below `BAR`.
"""

from __future__ import annotations

import json
import re
import tempfile
from functools import partial
from pathlib import Path

import adapter_tasks
import torch
from torch import Tensor, nn

from shardwise import parallelize
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.save import Saver
from shardwise.comm import everybody, gather_json
from shardwise.engine.ema import Ema
from shardwise.hf import export, save_adapters
from shardwise.hf import task as hf_task
from shardwise.models.tasks import decoder

BAR = 1e-5  # relative, in float32
ROUNDING = 1e2  # of fp16 against float32's bar
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def adapters_out(plan: str = "single") -> dict[str, float]:
    """Logits of a trained model against those of its adapters as peft loads them, and of the merged folder."""
    import peft
    import transformers

    engine = parallelize(adapter_tasks.configured(), plan)
    for step in range(2):
        engine.step(engine.task.batch(step))
    with tempfile.TemporaryDirectory() as home:
        adapter = save_adapters(engine, Path(home) / "adapter")
        weights = {name: value.cpu().clone() for name, value in engine.full_parameters()}
        if engine.rank > 0:  # the first alone has written
            engine.close()
            return {}
        module = engine.task.model()
        module.load_state_dict(weights, strict=False)
        own = _logits(module)
        merged = export(adapter, Path(home) / "merged", adapter_tasks.small_llama(), merge=True)
        base = transformers.AutoModelForCausalLM.from_pretrained(str(adapter_tasks.small_llama()))
        models = {
            "logits of the adapters": peft.PeftModel.from_pretrained(base, str(adapter)),
            "logits of the merged folder": transformers.AutoModelForCausalLM.from_pretrained(str(merged)),
        }
        errors = {name: float((_logits(model) - own).abs().max() / own.abs().max()) for name, model in models.items()}
    engine.close()
    return errors


def adapters_out_of_tp() -> dict[str, float]:
    """The same where two ranks have a half of each adapter."""
    return adapters_out("tp=2")


def gone_on_elsewhere() -> dict[str, float]:
    """Weights, average and loss scale of four steps in fp16, against two and two under a plan of other axes."""
    return _gone_on("dp_shard=2,tp=2,zero=1,precision=fp16", "dp_shard=2,pp=2,zero=2,microbatches=2,precision=fp16")


def _gone_on(first: str, then: str) -> dict[str, float]:
    straight, folder = _trained([(then, 4)]), gather_json(tempfile.mkdtemp(), everybody(), torch.device("cpu"))[0]
    apart = _trained([(first, 2), (then, 2)], folder)
    return {name: float((apart[name] - value).abs().max() / value.abs().max().clamp_min(1e-3)) / ROUNDING
            for name, value in straight.items()}  # fmt: skip


def _falling(step: int) -> float:
    return 1 / (1 + step)


def _trained(parts: list[tuple[str, int]], folder: str = "") -> dict[str, Tensor]:
    """Whole weights, "ema" before those of the average, and the loss scale, after steps under each plan in turn."""
    for number, (plan, steps) in enumerate(parts):
        # a run that goes on takes nothing of the weights that it is made with
        engine = parallelize(decoder().with_(optimizer=MOMENTUM), plan, seed=number, clip_norm=0.5, schedule=_falling)
        ema = Ema(engine, 0.5)
        if number:
            restore(engine, folder, ema=ema)
        for step in range(engine.steps_done, engine.steps_done + steps):
            engine.step(engine.task.batch(step))
            ema.update()
            engine.state.scale.value *= 0.5  # another one than a new run has
        if folder and not number:
            saver = Saver(engine, folder, background=False, ema=ema)
            saver.save()
            saver.close()
        values = {name: value.double().cpu() for name, value in engine.full_parameters()}
        with ema.applied():
            values |= {f"ema {name}": value.double().cpu() for name, value in engine.full_parameters()}
        values["scale"] = torch.tensor(engine.state.scale.value)
        engine.close()
    return values


@torch.no_grad()
def packed_examples() -> dict[str, float]:
    """Rows of chats against what is learned by hand, and the losses of packed rows against those of single ones."""
    from chat_tokenizer import STYLES, TALK, styled
    from torch.nn.functional import cross_entropy

    from shardwise.data import JsonlSource
    from shardwise.data.chat import ChatTemplate

    style = STYLES["chatml"]
    with tempfile.TemporaryDirectory() as home:
        theirs = styled(Path(home), style)
        path = Path(home) / "chat.jsonl"
        path.write_text("\n".join(json.dumps({"messages": TALK[:last]}) for last in (3, 5)))
        packed, single = (
            JsonlSource(path, 400, tokenizer=home, template=ChatTemplate(home), pack=pack) for pack in (True, False)
        )
    answers = "".join(re.findall("«(.*?)»", style.by_hand))
    row, rows = packed.read([0]), single.read([0, 1])
    learned = theirs.decode(rows["labels"][1][rows["labels"][1] != -100])
    model = _tiny(len(theirs))
    sums = []
    for batch in (row, rows):
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[:, :-1]
        sums.append(cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"))
    return {
        "what is learned": float(learned != answers),
        "the loss of packed examples": float(abs(sums[0] / sums[1] - 1)),
    }


def _tiny(words: int) -> nn.Module:
    import transformers

    # weights that are large, so that what a token sees matters
    config = transformers.LlamaConfig(vocab_size=words, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                      num_attention_heads=2, initializer_range=1.0)  # fmt: skip
    torch.manual_seed(0)
    return hf_task(config, batch=lambda step: {}).model().double().eval()


@torch.no_grad()
def _logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(adapter_tasks.architectures.words(9)["input_ids"]).logits
