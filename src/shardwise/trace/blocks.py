"""Find the repeated blocks of a module: the units that sharding gathers, recompute replays and the compiler compiles.

A block is a child of the outermost container (or module) that has several children of one class with parameters:
the layers of a decoder, the stages of a U-Net, the linear layers of a plain `nn.Sequential`. Where such a child holds
a large share of the model and has repeated children of its own (the stages of a Swin), those are the blocks.

No names are used. What this does not do: see a block that is written out inline in a forward.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.errors import InputError, did_you_mean

COARSE = 0.5  # a unit with more than this share of the model is too coarse to be worth sharding
DESCEND = 0.25  # a repeated child with more than this share is opened, if it has repeated children itself
FINE_ELEMENTS = 1000  # units smaller than this on average cost more in latency than they save


@dataclass(frozen=True)
class Blocks:
    """Paths of the blocks in module order, and what the user should know about them."""

    paths: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def _elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _repeated(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the children that may be blocks: they have parameters, and at least two share a class.

    Leaves count only where a list holds nothing else: a chain of linear layers is a list of blocks, but neither
    loose leaves beside each other (q, k, v) nor a mixed chain (convolution, norm, convolution, norm) are.
    """
    children = [(name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None]
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    counts = Counter(type(child) for _, child in children)
    # only a list of leaves of one class is a chain of blocks (test_queries_keys_and_values_are_not_blocks)
    if not is_list or len(counts) > 1:
        children = [(name, child) for name, child in children if next(child.children(), None) is not None]
        counts = Counter(type(child) for _, child in children)
    # no class comes twice: nothing is repeated
    if not counts or max(counts.values()) < 2:
        return []
    return [(name, child) for name, child in children if is_list or counts[type(child)] > 1]


def _walk(path: str, module: nn.Module, total: int, *, nested: bool) -> list[str]:
    """Returns the paths of blocks at or below `module`, outermost first.

    path, module  where the search starts, and the module there
    total         elements of the whole model's parameters
    nested        whether a block with more than `DESCEND` of them is replaced by its own repeated children
    """
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    repeated = {id(child) for _, child in _repeated(module)}
    paths: list[str] = []
    for name, child in children:
        # a list has no forward of its own to hook: its children may be units, never the list
        if id(child) in repeated and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            # only a large block is opened, and only where that finds more than one part of it
            inner = _walk(name, child, total, nested=nested) if nested and _elements(child) > DESCEND * total else []
            paths += inner if len(inner) > 1 else [name]
        else:
            paths += _walk(name, child, total, nested=nested)
    return paths


def _large_leaves(module: nn.Module, total: int) -> list[str]:
    """Returns dotted paths of the large children of `nn.Sequential`s; [] if there is at most one.

    A child is large if it has more than 1/n of `total` (elements of the whole model), for a Sequential of n children.
    """
    paths = []
    for path, child in module.named_modules():
        # loose layers that a forward calls as it likes may be parts of one operation (q, k, v); a Sequential's are not
        if isinstance(child, nn.Sequential):
            leaves = [(f"{path}.{name}" if path else name, leaf) for name, leaf in child.named_children()]
            # smaller ones would each cost a message that saves little memory
            paths += [name for name, leaf in leaves if _elements(leaf) * len(leaves) > total]
    return paths if len(paths) > 1 else []


def find_blocks(module: nn.Module, *, nested: bool = True) -> Blocks:
    """Returns the repeated blocks of a module, found by structure alone.

    `nested`: whether a large block that has repeated children is replaced by these. False if ranks may run different
    children of it (routed experts), since under zero=3 all ranks must run the same units.
    """
    total = _elements(module)
    seen: set[int] = set()
    paths = []
    for path in _walk("", module, total, nested=nested) or _large_leaves(module, total):
        child = module.get_submodule(path)
        # a layer that is called under two names is one unit; one with a tied weight stays with the root, which holds
        # the other end (test_a_block_that_shares_its_weight_is_left_to_the_root)
        if id(child) not in seen and not _shares_outside(module, child):
            seen.add(id(child))
            paths.append(path)
    return Blocks(tuple(paths), tuple(_warnings(module, paths, total)))


def blocks_of(module: nn.Module, wrap: tuple[str, ...] = (), *, nested: bool = True) -> Blocks:
    """Returns the blocks that `wrap` names, or the repeated ones if it is empty; `nested` as in `find_blocks`.

    Raises `InputError` as `choose_blocks` does.
    """
    return choose_blocks(module, wrap) if wrap else find_blocks(module, nested=nested)


def inner_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns each module once, inner modules before those that contain them, otherwise in reverse order."""
    once = {id(module): module for module in modules}
    last_first = list(once.values())[::-1]
    return sorted(last_first, key=lambda module: sum(1 for _ in module.modules()))


def _shares_outside(module: nn.Module, block: nn.Module) -> bool:
    """Whether a parameter of `block` is held outside it too (a tied weight, or a submodule that both hold)."""
    own = {id(param) for param in block.parameters()}
    seen, ahead = {id(block)}, [module]  # the block itself counts as seen, so only what lies outside it is visited
    while ahead:
        child = ahead.pop()
        # modules may hold each other, and one module may be reached twice
        if id(child) in seen:
            continue
        seen.add(id(child))
        if any(id(param) in own for param in child._parameters.values() if param is not None):
            return True
        ahead += [inner for inner in child._modules.values() if inner is not None]
    return False


def _matches(path: str, pattern: str) -> bool:
    """Whether a module path fits a pattern in which `*` stands for (part of) one name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]*"), path) is not None


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def choose_blocks(module: nn.Module, patterns: tuple[str, ...]) -> Blocks:
    """Returns the blocks that the user named: class names, or module paths in which `*` matches one name.

    Raises `InputError` for a pattern that matches nothing, and for a unit that shares a weight with modules outside it.
    """
    paths: list[str] = []
    for pattern in patterns:
        hits = [
            path
            for path, child in module.named_modules()
            if path and (type(child).__name__ == pattern or _matches(path, pattern))
        ]
        if not hits:
            names = sorted(
                {type(child).__name__ for child in module.modules()} | {p for p, _ in module.named_modules()}
            )
            # the whole model is no unit in itself
            if type(module).__name__ == pattern:
                raise InputError(_whole_model(module, pattern))
            found = find_blocks(module).paths
            near = did_you_mean(pattern, names) or (f"; its blocks are {_few(found)}" if found else "")
            raise InputError(f"wrap: nothing in the module matches '{pattern}'{near}")
        paths += [path for path in hits if path not in paths]
    # in the order of modules, whatever order the patterns are given in
    order = [path for path, _ in module.named_modules()]
    paths.sort(key=order.index)
    for path in paths:
        # a tied weight would be gathered by one unit and missed by the other
        if _shares_outside(module, module.get_submodule(path)):
            raise InputError(
                f"wrap: '{path}' holds a weight that a module outside it holds too, and a unit gathers what is its own "
                "alone: name a unit around both"
            )
    return Blocks(tuple(paths), tuple(_warnings(module, paths, _elements(module))))


def _whole_model(module: nn.Module, name: str) -> str:
    """Returns the message for a wrap= that names the model's own class."""
    inside = [type(module.get_submodule(path)).__name__ for path in find_blocks(module).paths]
    named = list(dict.fromkeys(inside)) or list(dict.fromkeys(type(child).__name__ for child in module.children()))
    return (
        f"wrap: '{name}' is the whole model, and units are parts of it: name a class or a path inside it, such as "
        f"wrap={named[0] if named else 'layers.*'}, or leave wrap out and repeated blocks are found"
    )


def _warnings(module: nn.Module, paths: list[str], total: int) -> list[str]:
    """Returns a sentence for each way in which the units `paths` are too large, too few or too small.

    Each names better units where there are some. `total`: elements of all parameters of `module`, the whole model.
    """
    # nothing repeats: the whole module is one unit
    if not paths:
        parts = _parts(module, "")
        named = f": name units in the plan, with {_spelt(module, parts)}" if parts else ""
        return [f"no repeated blocks were found, so the whole module is gathered at once{named}"]
    sizes = {path: _elements(module.get_submodule(path)) for path in paths}
    warnings = []
    largest = max(paths, key=lambda path: sizes[path])
    # a unit inside another one is part of the outer one's size
    rest = total - sum(sizes[p] for p in paths if not any(p.startswith(q + ".") for q in paths if q != p))
    parts = _parts(module, largest)
    # a single unit without parts leaves nothing else to name
    if sizes[largest] > COARSE * total and (len(paths) > 1 or parts):
        better = _spelt(module, [path for path in paths if path != largest] + parts)
        warnings.append(
            f"unit '{largest}' holds {sizes[largest] / total:.0%} of the model, which zero=3 gathers at once: "
            + (f"name smaller units with {better}" if parts else "it has no parts of which units could be made")
        )
    if rest > COARSE * total and total > FINE_ELEMENTS:
        better = _spelt(module, [*paths, *_largest_outside(module, paths)])
        warnings.append(
            f"{rest / total:.0%} of the model lies outside the units and is gathered at once: name it too with {better}"
        )
    if sum(sizes.values()) / len(paths) < FINE_ELEMENTS < total:
        larger = _around(module, paths)
        warnings.append(
            f"{len(paths)} units of about {sum(sizes.values()) // len(paths)} elements: zero=3 gathers each twice a "
            f"micro-batch, {2 * len(paths)} small messages that cost more than they save; "
            + (f"name larger ones with {_spelt(module, larger)}" if larger else "zero=2 sends none of them")
        )
    return warnings


def _parts(module: nn.Module, path: str) -> list[str]:
    """Returns the paths of children of `path` that could be units: with parameters, and sharing none outside."""
    dot = path and f"{path}."
    children = module.get_submodule(path).named_children()
    return [f"{dot}{name}" for name, child in children if _elements(child) and not _shares_outside(module, child)]


def _spelt(module: nn.Module, paths: list[str], most: int = 6) -> str:
    """Returns how a plan names these units, `wrap=Block|head`, of at most `most` names and then "...".

    Units go by their class if it has no other module, by `layers.*` if they are all children of a container, else by
    path.
    """
    # a class that also names modules outside cannot stand for these units alone
    strangers = {type(child).__name__ for path, child in module.named_modules() if path not in paths}
    names: dict[str, None] = {}
    for path in paths:
        kind, outer = type(module.get_submodule(path)).__name__, path.rpartition(".")[0]
        around = module.get_submodule(outer) if outer else None
        # all children of one container have a shorter name: "layers.*"
        alike = around is not None and all(f"{outer}.{name}" in paths for name, _ in around.named_children())
        names[kind if kind not in strangers else f"{outer}.*" if alike else path] = None
    return f"wrap={'|'.join(names)}" if len(names) <= most else f"wrap={'|'.join([*names][:most])}|..."


def _largest_outside(module: nn.Module, paths: list[str]) -> list[str]:
    """Returns [path] of the largest module that lies neither in a unit nor around one; [] where there is none."""
    apart = {
        path: _elements(child) for path, child in module.named_modules()
        if path and not any(f"{path}.".startswith(f"{unit}.") or f"{unit}.".startswith(f"{path}.") for unit in paths)
        and not _shares_outside(module, child)
    }  # fmt: skip
    return [max(apart, key=lambda path: apart[path])] if any(apart.values()) else []


def _around(module: nn.Module, paths: list[str]) -> list[str]:
    """Returns the paths of the modules directly around these units, without lists, dicts and the model itself."""
    outer_paths: dict[str, None] = {}
    for path in paths:
        outer = path.rpartition(".")[0]
        while outer and isinstance(module.get_submodule(outer), nn.ModuleList | nn.ModuleDict):
            outer = outer.rpartition(".")[0]
        if outer:
            outer_paths[outer] = None
    return list(outer_paths)
