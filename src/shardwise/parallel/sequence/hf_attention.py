"""transformers' attention and masks on cut positions, by its `AttentionInterface` and `AttentionMaskInterface`.

    mask functions     causal, window, packed, padding, as the model composes them: a `PairMask`, never (S, S)
    keys and values    as few as they are, not repeated for each query head

Both hold for implementation "sdpa", unless somebody else has replaced it, and only while some module of this process
has its positions cut. Recompute in backward meets the same functions.

What this does not do: attention that a model writes out itself ("eager": softcap, sinks), which is exact by the rules
for products and softmax; masks that a model adds a position bias to (T5), which are tensors.
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
    """Put both functions in place, where transformers is in use and its own are there. Called for each cut module."""
    masks = sys.modules.get("transformers.masking_utils")
    models = sys.modules.get("transformers.modeling_utils")
    attention = sys.modules.get("transformers.integrations.sdpa_attention")
    # transformers is not in use, or not all of it: nothing to replace
    if masks is None or models is None or attention is None:
        return
    # each is replaced only where transformers' own stands: another library's stays, and a second call changes nothing
    interface = getattr(masks, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    made = getattr(masks, "sdpa_mask", None)
    if interface is not None and made is not None and interface[KIND] is made:
        interface[KIND] = _masks(masks, made)
    functions, own = getattr(models, "ALL_ATTENTION_FUNCTIONS", None), attention.sdpa_attention_forward
    if functions is not None and functions[KIND] is own:
        functions[KIND] = _attention(own)


def _masks(masks: Any, made: Any) -> Any:
    """Returns a `sdpa_mask` that gives a `PairMask` in place of a tensor; `made`: transformers' own function."""

    def mask(
        batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
        mask_function: Any = masks.causal_mask_function, attention_mask: torch.Tensor | None = None,
        local_size: int | None = None, allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False,
        use_vmap: bool = False, device: Any = "cpu", **kwargs: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        def as_a_tensor() -> torch.Tensor | None:
            return made(
                batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
                allow_is_causal_skip, allow_is_bidirectional_skip, use_vmap, device, **kwargs
            )  # fmt: skip

        # nothing is cut; a function of the user's own that only vmap evaluates; an offset: of a cache
        if not CUT_MODULES or use_vmap or q_offset or kv_offset:
            return as_a_tensor()
        # None where transformers gives None too: kernels are told `is_causal`, or nothing
        padding = masks.prepare_padding_mask(attention_mask, kv_length, 0)
        if allow_is_causal_skip and masks._ignore_causal_mask_sdpa(padding, q_length, kv_length, 0, 0, local_size):
            return None
        if allow_is_bidirectional_skip and masks._ignore_bidirectional_mask_sdpa(padding, kv_length, local_size):
            return None
        function = mask_function
        if padding is not None:
            function = masks.and_masks(function, masks.padding_mask_function(padding))
        try:  # padding may be a part: ranks look at blocks of the mask each for themselves, without a collective
            function = whole_function(function)
        except ValueError:  # it closes over something that is not followed: then a tensor is made, as on one process
            return as_a_tensor()
        shape = (batch_size, 1, q_length, kv_length)
        return PairMask(function, shape, torch.device(device), _looks_back(mask_function, q_length, kv_length))

    return mask


def _looks_back(function: Function, rows: int, columns: int) -> bool:
    """Returns whether a pattern lets the last query read the first key, and not the first query the last key.

    False for a pattern that reads tensors.
    """
    try:
        # on real indices, also in a rehearsal whose tensors have no values
        with _disable_current_modes():
            at = torch.tensor([0, max(rows, columns) - 1])
            zero = torch.zeros(1, dtype=torch.int64)
            allowed = function(zero, zero, at, at.flip(0))
            return allowed.tolist() == [False, True] and not _reads_tensors(function)
    except Exception:  # a pattern of tensors that are cut, or have no values here: how to deal positions is a choice
        return False


def _reads_tensors(function: Any) -> bool:
    """Returns whether a mask's function closes over tensors."""
    return bool(PairMask(function, (1, 1, 1, 1), torch.device("cpu"), False).fixed is False)


def _attention(own: Any) -> Any:
    """Returns `sdpa_attention_forward` that does not repeat keys and values of cut positions; `own`: transformers'."""

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        fewer = key.shape[1] != query.shape[1]
        asked = any(kwargs.get(name) is not None for name in ("position_bias", "cache", "softcap"))
        # without a mask transformers leaves them as few by itself; with one it would repeat them for each query head.
        # Where no positions are cut its own function is asked, whatever the process has met before
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
