"""Refuse modules that no plan, or not this plan, can run: sparse, scripted, on shared memory, complex in 16 bits."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.look.replaced_parameters import codes_of_forward
from shardwise.part.pairs import pairs_in
from shardwise.trace.outside_state import assigned_names
from shardwise.trace.stand_in import tensors_beside


def refuse(module: nn.Module, plan: Plan) -> None:
    """Raise `InputError` for a module without a trainable parameter, `RefusedPlan` for one that this plan cannot run.

    That is a module with sparse weights, complex weights in 16 bits, different tensors that share memory, or an
    attribute that is a view of a weight.
    """
    if not any(param.requires_grad for param in module.parameters()):
        raise InputError("the model has no parameter that requires a gradient: there is nothing to train")
    _refuse_sparse(module)
    _refuse_complex(module, plan)
    _refuse_shared_memory(module)
    _refuse_views_beside(module)


def works_inside(plan: Plan) -> bool:
    """Whether the plan shards or sends weights (zero=3, tp, pp, ep), so that complex ones are held as real pairs."""
    return plan.sharded.weights or plan.tp > 1 or plan.pp > 1 or plan.ep > 1


def scripted(module: nn.Module) -> str | None:
    """Returns the path of the first submodule that `torch.jit.script` or `trace` made, None without one."""
    return next((path for path, child in module.named_modules() if isinstance(child, torch.jit.ScriptModule)), None)


def refuse_scripted(module: nn.Module, plan: Plan) -> None:
    """Raise `RefusedPlan` if the module contains a `torch.jit` one and the plan changes forwards.

    Those are tp, pp, ep, zero=3 and remat.
    """
    path = scripted(module)
    # Replicas, zero=1 and 2 touch weights and gradients alone.
    inside = [name for name in ("tp", "pp", "ep") if getattr(plan, name) > 1]
    inside += [f"zero={plan.zero}"] * plan.sharded.weights + ["remat"] * (plan.remat != "none")
    if path is not None and inside:
        raise RefusedPlan(
            f"'{path}' was made by torch.jit, and {inside[0]} has to look into its forward: give the module as it was "
            "before, or use replicas, zero=1 or zero=2 without recompute"
        )


def own_collective(plan: Plan, op: str, place: str) -> RefusedPlan:
    """Returns the refusal of a forward that issues a collective itself, under a plan whose ranks run parts of it.

    op     the collective's name;  place  the line of code that issues it
    """
    return RefusedPlan(
        f"the forward issues a collective itself ({op} at {place}), for which every rank must run all of it on samples "
        f"of its own: under {plan} ranks run parts of it, or parts of the same samples. Use data ranks alone "
        "(dp_replicate, dp_shard)"
    )


def _refuse_sparse(module: nn.Module) -> None:
    """Raise `RefusedPlan` for a parameter or buffer that is not dense."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout is not torch.strided:
            raise RefusedPlan(
                f"'{name}' is a tensor of layout {tensor.layout}, and masters, buckets and shards are dense: hold it "
                "dense with a mask, or hold its values as a parameter and make the sparse tensor in the forward"
            )


def _refuse_complex(module: nn.Module, plan: Plan) -> None:
    """Raise `RefusedPlan` for a complex parameter in 16 bits: torch computes with few complex numbers so narrow."""
    pairs = pairs_in(module)
    narrow = [f"precision={plan.precision}"] * (plan.precision not in ("fp32", "fp64"))
    narrow += [f"reduce_dtype={plan.reduce_dtype}"] * (plan.reduce_dtype in ("bf16", "fp16"))
    for name, param in module.named_parameters():
        if narrow and (param.is_complex() or name in pairs):
            raise RefusedPlan(
                f"parameter '{name}' is complex, and {narrow[0]} rounds to 16 bits, of which torch makes no complex "
                "numbers to compute with: use fp32"
            )


def _refuse_shared_memory(module: nn.Module) -> None:
    """Raise `RefusedPlan` for two tensors, one of them trained, that overlap in memory without being one tensor.

    In one process training one changes the other; ranks hold them apart.
    """
    spans: dict[int, list[tuple[int, int, str, bool]]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel():
            start = tensor.storage_offset() * tensor.element_size()
            # from the first element to the last, gaps included; a tied tensor is named once, so it does not meet itself
            length = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            span = (start, start + length * tensor.element_size(), name, tensor.requires_grad)
            spans.setdefault(tensor.untyped_storage()._cdata, []).append(span)
    for shared in spans.values():
        for place, (start, stop, name, trained) in enumerate(shared):
            for other_start, other_stop, other, other_trained in shared[:place]:
                # two frozen tensors may share: nothing writes into them
                if start < other_stop and other_start < stop and (trained or other_trained):
                    raise RefusedPlan(
                        f"'{name}' shares memory with '{other}' without being the same tensor, so that training one "
                        "changes the other: tie by assigning the same Parameter, or take the view in the forward"
                    )


def _refuse_views_beside(module: nn.Module) -> None:
    """Raise `RefusedPlan` for a view of a parameter that the constructor stores outside the module's parameters.

    Ranks replace the parameter by a new tensor, which the view would not follow. Allowed are an attribute that the
    forward, or a pre-forward hook (spectral norm), assigns again, and one that views a frozen weight, since it gets
    its values as a buffer does.
    """
    params = {id(param): (name, param) for name, param in module.named_parameters()}
    memories = {
        param.untyped_storage()._cdata: (name, param.requires_grad)
        for name, param in params.values()
        if param.layout is torch.strided and param.device.type != "meta" and param.numel()
    }
    made_again: set[str] | None = None
    for where, key, child, tensor in tensors_beside(module):
        if id(tensor) in params or tensor.layout is not torch.strided or tensor.device.type == "meta":
            continue
        name, trained = memories.get(tensor.untyped_storage()._cdata, ("", False))
        is_constant = child is not None and vars(child)[key] is tensor and not trained
        if not name or is_constant or (child is not None and child._forward_pre_hooks):
            continue
        if made_again is None:
            made_again = {key for code in codes_of_forward(module) for key in assigned_names(code)}
        # an attribute that the forward assigns is a new view by then; of closures and globals (None) that is unknown
        if child is None or key not in made_again:
            raise RefusedPlan(
                f"'{where}' keeps a view of the parameter '{name}', made before the first forward: in one process it "
                "follows the weight, and ranks hold the weight anew, which it would not follow: make the view in the "
                "forward (self.weight[:4] there), or in a property"
            )


def make_gradients_dense(module: nn.Module) -> None:
    """Sets `sparse=False` on all embeddings, since gradient buckets and shards are dense; the values are the same."""
    for child in module.modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag):
            child.sparse = False
