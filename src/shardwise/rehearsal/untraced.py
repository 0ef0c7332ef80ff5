"""Say why a module could not be traced without values: the module, the line, the reason, what to do."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from shardwise.task_names import inputs_hint

NARROW = ("BFloat16", "bfloat16", "'Half'", "dtype Half")  # as torch's errors name them


class ModulePath:
    """Paths of the modules whose forward runs, so that a failure can be placed."""

    def __init__(self) -> None:
        self.path: list[str] = []

    def watch(self, model: nn.Module) -> None:
        """Follow the forwards of a model and of all modules in it."""
        for path, child in model.named_modules():
            name = f"'{path}' ({type(child).__name__})" if path else type(child).__name__
            child.register_forward_pre_hook(lambda m, a, name=name: self.path.append(name))
            child.register_forward_hook(lambda m, a, o: self._left())

    def _left(self) -> None:
        if self.path:
            self.path.pop()


def untraced(error: BaseException, inside: ModulePath) -> str:
    """Returns the message of a model that could not be traced: the module, the line, the reason, what to do."""
    where = f"in {inside.path[-1]}, " if inside.path else ""
    text = (str(error).strip().splitlines() or ["(no message)"])[0]
    what = f"{type(error).__name__}: {text}"
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        what = (
            f"a value that only a real run has is asked for ({text}); decide by shapes or by integers of the batch, "
            "or compute both ways and choose with torch.where"
        )
    elif any(name in text for name in NARROW):  # "Unsupported dtype BFloat16", as Fourier transforms say
        what += "; an op of it does not take that precision: plan with precision=fp32"
    return f"the model cannot be traced without values: {where}{_line_of(error)}{what}{inputs_hint(error)}"


def _line_of(error: BaseException) -> str:
    """Returns the place of an error: the innermost line of the user's own code, else of the model's library."""
    from traceback import extract_tb

    ours = str(Path(__file__).parents[1])
    frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    own = [f for f in frames if "site-packages" not in f.filename and "dist-packages" not in f.filename]
    theirs = [f for f in frames if "/torch/" not in f.filename]
    if not (chosen := own or theirs):
        return ""
    return f"{chosen[-1].filename}:{chosen[-1].lineno}: "
