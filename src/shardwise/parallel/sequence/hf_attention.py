"""transformers' attention and masks on cut positions, by its `AttentionInterface` and `AttentionMaskInterface`.

    mask functions     causal, window, packed, padding, as the model composes them, become a `PairMask`, never (S, S)
    keys and values    keep their number of heads, and are not repeated for each query head

Both apply to the implementation "sdpa", unless another library has replaced it, and only if some module of this process
has its positions cut. Recompute in backward uses the same functions.

What this does not do: attention that a model computes itself ("eager": softcap, sinks), which is exact by the rules
for products and softmax; masks to which a model adds a position bias (T5), which are tensors.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.parallel.sequence.pair_mask import Function, PairMask, whole_function
from shardwise.part.levels import has_cut_positions
from shardwise.part.parameters import CUT_MODULES, ON_CUT

KIND = "sdpa"


def install() -> None:
    """Replaces transformers' "sdpa" functions for masks and attention, if it is loaded. Called for each cut module."""
    masks = sys.modules.get("transformers.masking_utils")
    models = sys.modules.get("transformers.modeling_utils")
    attention = sys.modules.get("transformers.integrations.sdpa_attention")
    if masks is None or models is None or attention is None:
        return
    # only transformers' own functions are replaced, so another library's stay, and a second call changes nothing
    interface = getattr(masks, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    made = getattr(masks, "sdpa_mask", None)
    if interface is not None and made is not None and interface[KIND] is made:
        interface[KIND] = _masks(masks, made)
    functions, own = getattr(models, "ALL_ATTENTION_FUNCTIONS", None), attention.sdpa_attention_forward
    if functions is not None and functions[KIND] is own:
        functions[KIND] = _attention(own)


def _masks(masks: Any, made: Any) -> Any:
    """Returns a replacement of `sdpa_mask` that returns a `PairMask` in place of a tensor, if positions are cut.

    masks   the module transformers.masking_utils;  made  its own `sdpa_mask`
    """

    def mask(
        batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
        mask_function: Any = masks.causal_mask_function, attention_mask: torch.Tensor | None = None,
        local_size: int | None = None, allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False,
        use_vmap: bool = False, device: Any = "cpu", **kwargs: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        def as_a_tensor() -> torch.Tensor | None:
            """Returns what transformers' own function does."""
            return made(
                batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
                allow_is_causal_skip, allow_is_bidirectional_skip, use_vmap, device, **kwargs
            )  # fmt: skip

        # `use_vmap`: a user's function that does not broadcast; offsets: there is a cache
        if not CUT_MODULES or use_vmap or q_offset or kv_offset:
            return as_a_tensor()
        # as in transformers, None if kernels need no mask, or `is_causal` alone
        padding = masks.prepare_padding_mask(attention_mask, kv_length, 0)
        if allow_is_causal_skip and masks._ignore_causal_mask_sdpa(padding, q_length, kv_length, 0, 0, local_size):
            return None
        if allow_is_bidirectional_skip and masks._ignore_bidirectional_mask_sdpa(padding, kv_length, local_size):
            return None
        function = mask_function
        if padding is not None:
            function = masks.and_masks(function, masks.padding_mask_function(padding))
        try:  # gathers cut tensors (padding) now, since later each rank evaluates blocks of the mask by itself
            function = whole_function(function)
        except ValueError:  # the function closes over objects in which tensors cannot be replaced
            return as_a_tensor()
        shape = (batch_size, 1, q_length, kv_length)
        return PairMask(function, shape, torch.device(device), _looks_back(mask_function, q_length, kv_length))

    return mask


def _looks_back(function: Function, rows: int, columns: int) -> bool:
    """Whether a mask function lets the last query read the first key, but not the first query the last key.

    False for a function that reads tensors. `rows`, `columns`: numbers of queries and of keys.
    """
    try:
        # on real indices, also in a rehearsal whose tensors have no values
        with _disable_current_modes():
            at = torch.tensor([0, max(rows, columns) - 1])
            zero = torch.zeros(1, dtype=torch.int64)
            allowed = function(zero, zero, at, at.flip(0))
            return allowed.tolist() == [False, True] and not _reads_tensors(function)
    except Exception:  # it reads cut tensors, or tensors without values; the answer only decides about speed
        return False


def _reads_tensors(function: Any) -> bool:
    """Whether a mask function closes over tensors."""
    return bool(PairMask(function, (1, 1, 1, 1), torch.device("cpu"), False).fixed is False)


def _attention(own: Any) -> Any:
    """Returns a replacement of `own`, transformers' `sdpa_attention_forward`, that does not repeat keys and values.

    It calls `own` unless positions are cut.
    """

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        fewer = key.shape[1] != query.shape[1]
        asked = any(kwargs.get(name) is not None for name in ("position_bias", "cache", "softcap"))
        # with a mask transformers would repeat keys and values for each query head; without one it does not
        if not fewer or asked or attention_mask is None or not has_cut_positions(query):
            return own(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                       is_causal=is_causal, **kwargs)  # fmt: skip
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None

    return attention


ON_CUT.append(install)

__all__ = ["install"]
