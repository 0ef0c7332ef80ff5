"""The scripts of `tasks/scripts` with the few lines that `prepare` changes, and what they come to."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from shardwise.trace.double import KeepDouble

SCRIPTS = Path(__file__).parents[1] / "tasks" / "scripts"
BAR = 1e-10
CALL = "prepared = model, optimizer, {loader} = shardwise.prepare(model, optimizer, {loader}, plan={plan!r})"

# what `prepared.backward` is told beside the loss -> scripts; None: another line goes backward
TOLD: dict[str | None, str] = {
    "": (
        "char_gpt unet diffusion lstm_lm transformer_lm unet_dice diffusion_ema contrastive reinforce mixup "
        "shifted_gpt weather diffusion_unet dino truncated momentum_contrast lookahead agent "
        "swav translation"
    ),
    None: "causal_lm endless mean_teacher",
    " * len(y), len(y)": "image_classifier",
    ", summed=True": "vae",
    ", mean_over=len(same)": "siamese",
    ", mean_over=(batch['labels'] != -100).sum()": "masked_lm seq2seq",
    ", mean_over=b": "gan",
    ", mean_over=len(x)": "unet3d multitask segmentation",
    ", mean_over=len(y)": "graph_net neural_operator distillation lora swa stages noisy_gradients",
    ", mean_over=(classes >= 0).sum()": "detector",
    ", mean_over=len(y), also=[of_head]": "two_optimizers",
    ", mean_over=len(targets)": "augmented",
    ", mean_over=len(xb)": "early_stopping lbfgs_fit",
    ", mean_over=len(s)": "actor_critic",
    ", mean_over=(tokens[:, 1:] != 0).sum()": "stream",
    ", mean_over=criterion.weight[y].sum()": "rare_classes",
    ", mean_over=len(labels)": "fine_tuning",
    ", mean_over=len(z)": "wasserstein",
    ", mean_over=len(batch[0])": "trainer",
}
CHANGES = {name: told for told, names in TOLD.items() for name in names.split()}
MORE: dict[str, tuple[str, str]] = {  # another line that changes: as it was, as it is
    "causal_lm": (
        "loss.backward()",
        "n = (batch['labels'][:, 1:] != -100).sum(); loss = prepared.backward(loss * n, n)",
    ),
    "gan": ("loss_d.backward()", "loss_d = of_judge.backward(loss_d, mean_over=b)"),
    "diffusion_ema": ("average.update_parameters(model)", "average.update_parameters(prepared)"),
    "early_stopping": (
        "best_loss, best = val, copy.deepcopy(model.state_dict())",
        "best_loss, best = val, copy.deepcopy(prepared.state_dict())",
    ),
    "actor_critic": ("critic_loss.backward()", "critic_loss = of_critic.backward(critic_loss, mean_over=len(s))"),
    "swa": ("swa_model.update_parameters(model)", "swa_model.update_parameters(prepared)"),
    "wasserstein": ("d_loss.backward()", "d_loss = of_critic.backward(d_loss, mean_over=len(z))"),
    "momentum_contrast": (
        "queue[:, pointer : pointer + len(k)] = k.T",
        "k = prepared.gather(k); queue[:, pointer : pointer + len(k)] = k.T",
    ),
    "stages": (
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)",
        "optimizer = prepared.replace_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))",
    ),
    "endless": ("(loss / 2).backward()", "loss = 2 * prepared.backward(loss / 2)"),
    "mean_teacher": (  # two means, over samples of two loaders
        "loss.backward()",
        "loss = prepared.backward(F.cross_entropy(logits, y), mean_over=len(y)) + "
        "prepared.backward(0.5 * cons, mean_over=len(u), loader=unlabelled)",
    ),
    "translation": ("judged.backward()", "judged = of_judge.backward(judged)"),
}
# where a script's own lines read or write weights, which ranks hold in pieces: one line each
NO_GRAD = "with torch.no_grad():"
WHOLE_GRAD = "with torch.no_grad(), prepared.whole():"
IN_WHOLE: dict[str, list[tuple[str, str]]] = {
    "momentum_contrast": [(NO_GRAD, WHOLE_GRAD)],
    "dino": [(f"{NO_GRAD}\n            for q, k", f"{WHOLE_GRAD}\n            for q, k")],
    "mean_teacher": [(f"{NO_GRAD}\n            for t, s", f"{WHOLE_GRAD}\n            for t, s")],
    "swav": [(f"        {NO_GRAD}\n            w =", f"        {WHOLE_GRAD}\n            w ="),
             (f"{NO_GRAD}\n                out", f"{WHOLE_GRAD}\n                out")],
    "lookahead": [("        optimizer.step()\n        losses",
                   "        with prepared.whole(): optimizer.step()\n        losses")],
    "noisy_gradients": [(line, line.replace("\n", "\n    ")) for line in (
        "        for name, p in model.named_parameters():\n            p.grad += 0.01 * torch.randn(p.grad.shape)\n"
        '            if name.endswith("weight"):\n                p.grad.data.add_(p.data, alpha=1e-2)',)],
}  # fmt: skip
IN_WHOLE["noisy_gradients"] = [
    (before, f"        with prepared.whole(grads=True):\n    {after}") for before, after in IN_WHOLE["noisy_gradients"]
]
LOADERS = dict.fromkeys(("image_classifier", "unet3d", "early_stopping"), "train_loader") | {
    "mean_teacher": "labelled",
    "endless": "train",
}  # "loader", where nothing else is said
# a second model in the loop is prepared too, on one line more
SECOND = {
    "gan": "of_judge = judge, judges, loader = shardwise.prepare(judge, judges, loader, plan={plan!r})",
    "actor_critic": "of_critic = critic, critics, loader = shardwise.prepare(critic, critics, loader, plan={plan!r})",
    "wasserstein": "of_critic = critic, critics, loader = shardwise.prepare(critic, critics, loader, plan={plan!r})",
    "translation": (
        "of_judge = judge, judges, loader = shardwise.prepare(judge, judges, loader, plan={plan!r}, "
        'loss_scope="global")'
    ),
    "mean_teacher": "unlabelled = prepared.split(unlabelled)",
    "two_optimizers": "of_head = head, heads, loader = shardwise.prepare(head, heads, loader, plan={plan!r})",
}
WHOLE = ', loss_scope="global"'  # losses of whole batches
OPTIONS = {"transformer_lm": ", batch_dim=1", "unet_dice": WHOLE, "contrastive": WHOLE, "mixup": WHOLE, "dino": WHOLE,
           "swav": WHOLE, "translation": WHOLE,
           "truncated": ", batch_dim=1"}  # fmt: skip
FIRST_LINE_OF_LOOP = "losses = []"
EXTRA = {"endless": ",accumulate=2", "unet": ",accumulate=2", "seq2seq": ",accumulate=2", "stream": ",accumulate=2"}
CLIP = re.compile(r"^( +(?:\w+ = )?)(?:torch\.)?nn\.utils\.clip_grad_norm_\(model\.parameters\(\), (.+)\)$", re.M)


def changed(name: str, plan: str) -> str:
    """The script with its few changed lines; the count is the test's promise."""
    text, told = (SCRIPTS / f"{name}.py").read_text(), CHANGES[name]
    lines = 2  # the import and the call
    if name in MORE:
        before, after = MORE[name]
        assert text.count(f" {before}\n") == 1
        text, lines = text.replace(f" {before}\n", f" {after}\n"), lines + 1
    if told is not None:
        text, found = re.subn(r"(?<= )loss\.backward\(\)\n", f"loss = prepared.backward(loss{told})\n", text)
        lines += found
    text, found = CLIP.subn(r"\1prepared.clip_grad_norm_(\2)", text)
    for before, after in IN_WHOLE.get(name, []):
        assert text.count(before) == 1
        text, lines = text.replace(before, after), lines + 1
    assert lines + found <= (6 if name in IN_WHOLE else 4)
    loader = LOADERS.get(name, "loader")
    call = CALL.format(loader=loader, plan=plan + EXTRA.get(name, ""))[:-1] + f"{OPTIONS.get(name, '')})"
    if name in SECOND:
        call += "\n" + SECOND[name].format(plan=plan)
    return text.replace("import torch\n", "import shardwise\nimport torch\n", 1).replace(
        FIRST_LINE_OF_LOOP, f"{call}\n{FIRST_LINE_OF_LOOP}"
    )


def run_script(path: str) -> dict[str, Any]:
    """What a script came to: run by itself where nothing was prepared, else over the ranks of the pool."""
    torch.set_default_dtype(torch.float32)
    with KeepDouble():  # transformers computes its loss in float32; both sides keep float64
        names = runpy.run_path(path, run_name="__main__")
    torch.set_default_dtype(torch.float32)
    prepared = names.get("prepared")
    weights = prepared.state_dict() if prepared is not None else names["model"].state_dict()
    told = {key: names[key] for key in ("sample", "generated", "correct", "made") if key in names}
    found = {"losses": names["losses"], "weights": weights, "told": told}
    # FSDP2's hooks on the last loss know the model, whose class knows the script's names, the loss among them: a cycle
    # through autograd that Python's collector does not see
    for value in names.values():
        if isinstance(value, FunctionType) and value.__globals__.get("__name__") == "__main__":
            value.__globals__.clear()
    return found


def same(run: dict[str, Any], alone: dict[str, Any]) -> None:
    apart = [abs(a - b) / abs(b) for a, b in zip(run["losses"], alone["losses"], strict=True)]
    assert max(apart) < BAR, apart
    assert run["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        bar = BAR * max(1.0, float(weight.abs().max()))
        assert float((run["weights"][name] - weight).abs().max()) < bar, name
