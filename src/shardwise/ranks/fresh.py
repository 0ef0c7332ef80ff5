"""Resets torch's global settings to their defaults, for a process that runs one job after another.

A job that fails may leave dispatch modes, a default dtype or saved-tensor hooks that it has set, and the next job would
run under them. Nothing here imports a package that the job did not.

What this does not do: undo what a job changed in the code or the attributes of modules (monkey patches).
"""

from __future__ import annotations

import random
import sys
import warnings

_FILTERS = tuple(warnings.filters)


def reset_process(threads: int) -> None:
    """Leaves every mode, resets global settings of torch, NumPy and Python, and seeds their generators with 0.

    threads   number of torch threads to set
    """
    import torch

    from shardwise.device import forget_settings

    _leave_modes()
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_anomaly_enabled(False)
    torch.set_flush_denormal(False)
    torch.set_warn_always(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_printoptions(profile="default")
    torch.autograd.set_multithreading_enabled(True)
    torch.distributions.Distribution.set_default_validate_args(__debug__)  # torch.compile ends it for the process
    _forget_hooks()
    forget_settings()
    torch.manual_seed(0)
    random.seed(0)
    warnings.filters = list(_FILTERS)
    warnings._filters_mutated()  # type: ignore[attr-defined]
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        numpy.random.seed(0)
        numpy.seterr(divide="warn", over="warn", under="ignore", invalid="warn")


def _leave_modes() -> None:
    """Leaves torch-function and dispatch modes, and the default device, that a job has set and not left."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    torch.set_default_device(None)
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    while _get_current_dispatch_mode_stack():
        torch._C._pop_torch_dispatch_stack(None)


def _forget_hooks() -> None:
    """Removes torch's global module hooks and its default saved-tensor hooks."""
    import torch
    from torch.nn.modules import module

    for name, hooks in vars(module).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            hooks.clear()
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
