"""The floors of the house: a room imports from lower floors only. See docs/design.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import shardwise

SOURCE = Path(shardwise.__file__).parent

# room -> floor; a room is a module or a package, and `parallel` has one room for each technique
FLOORS = {
    "errors": 0, "task": 0, "dataset": 0, "layout": 0, "config": 0, "cluster": 0,
    "host": 0, "device": 0, "boundary": 0, "guard": 0, "task_files": 0, "progress": 0, "python_seeds": 0, "report": 1,
    "costs": 1, "precision": 1, "mesh": 1, "comm": 1, "part": 1, "trace": 1, "random": 1, "ranks": 1,
    "heads": 1, "task_names": 1, "digest": 1, "adapters": 1, "parallel.fsdp": 2,
    "parallel.slots": 3, "parallel.replicate": 3, "parallel.flat": 3, "parallel.full": 3, "parallel.batchnorm": 3,
    "parallel.on_all_samples": 3,
    "parallel.tensor": 3,
    "parallel.expert": 3,
    "parallel.sequence": 3,
    "parallel.domain": 3,
    "parallel.pipeline": 3,
    "memory": 3, "tiers": 3,
    "step": 4, "rollouts": 4,
    "look": 5, "engine": 5,
    "simulator": 6, "rehearsal": 6, "planner": 6, "measure": 6,
    "data": 7, "observe": 7, "checkpoint": 7, "training": 7, "proof": 7, "launch": 7,
    "cli": 8, "testing": 8, "scripts": 8, "hf": 8, "ray": 8,
}  # fmt: skip

# imports within one floor, each with its reason
WITHIN = {
    ("task", "errors"): "every room raises the same errors",
    ("task", "dataset"): "a map-style dataset given as Task.data becomes a source",
    ("task", "boundary"): "a task with a declared boundary builds its module with it",
    ("boundary", "errors"): "every room raises the same errors",
    ("dataset", "errors"): "every room raises the same errors",
    ("task_names", "adapters"): "a configuration's task has the adapters that its [lora] asks for",
    ("layout", "errors"): "every room raises the same errors",
    ("config", "errors"): "every room raises the same errors",
    ("config", "task_files"): "a task named by its file alone is told which tasks the file has",
    ("task_files", "errors"): "every room raises the same errors",
    ("config", "layout"): "a configuration holds a plan",
    ("part", "comm"): "parts meet in collectives",
    ("part", "trace"): "one trial says whether an operation treats each element alone",
    ("cluster", "errors"): "every room raises the same errors",
    ("engine", "look"): "the engine looks at its task before the first step",
    ("rehearsal", "simulator"): "a rehearsal counts what the simulator takes time for",
    ("planner", "rehearsal"): "a task is forecast from what its step does",
    ("planner", "simulator"): "plans are ranked by simulated time",
    ("measure", "rehearsal"): "what the engine adds is a measured step without what its operations take",
    ("measure", "planner"): "what the engine adds is a measured step without its forecast",
    ("mesh", "comm"): "a mesh is made of the axes that collectives run over",
    ("ranks", "comm"): "a rank writes down what it issues, for its caller to watch it",
    ("random", "trace"): "one function makes every seed",
    ("trace", "task_names"): "a constructor that fails is told with the user's line",
    ("device", "errors"): "every room raises the same errors",
    ("host", "device"): "whether the host waits depends on where a tensor lies",
    ("observe", "data"): "floor 7 has an order: data, observe, training, proof",
    ("cli", "scripts"): "verify proves scripts",
    ("cli", "testing"): "verify plays what a plan issues, recorded on the mock accelerator",
    ("cli", "hf"): "a checkpoint is turned into a folder of transformers",
    ("training", "data"): "floor 7 has an order: data, observe, training, proof",
    ("training", "observe"): "floor 7 has an order: data, observe, training, proof",
    ("training", "checkpoint"): "floor 7 has an order: data, observe, checkpoint, training, proof",
    ("proof", "data"): "floor 7 has an order: data, observe, training, proof",
    ("proof", "observe"): "floor 7 has an order: data, observe, training, proof",
    ("proof", "checkpoint"): "a proof reads the checkpoint of the run that it proves",
    ("launch", "training"): "a job's hours are those of the run that `train` would settle",
    ("proof", "training"): "floor 7 has an order: data, observe, training, proof",
}
SHARED = "parallel.slots"  # what every technique offers; the only room its siblings may import
BESIDE = "models"  # reference models: import only task and errors
MAY_IMPORT_MODELS = {"training", "cli", "testing"}
DOORSTEP = {"__init__", "__main__"}  # the lazy public names, and `python -m shardwise`


def room_of(dotted: str) -> str:
    """The room of a module path below `shardwise`, "" for the package itself."""
    parts = dotted.split(".")
    if parts[0] == "parallel":
        return ".".join(parts[:2])
    return parts[0]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement below a node; imports are statements, and nine of ten nodes are parts of expressions."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(tree, field, ()):
            yield child
            yield from statements(child)


def imported(tree: ast.AST, module: str) -> Iterator[tuple[str, int]]:
    """(module path below `shardwise`, line) of every import, those inside functions too."""
    for node in statements(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} uses a relative import"
            assert node.module is not None
            names = [node.module]
            if node.module in ("shardwise", "shardwise.parallel"):  # from shardwise import comm
                names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "shardwise":
                yield name.removeprefix("shardwise").removeprefix("."), node.lineno


@cache
def tree_of(path: Path) -> ast.Module:
    """A module's syntax, parsed once for all tests here."""
    return ast.parse(path.read_text())


def all_imports() -> Iterator[tuple[str, str, str]]:
    """(importing room, imported room, where) for each import between rooms of the package."""
    known = {path.stem if path.is_file() else path.name for path in SOURCE.iterdir()}
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        if module in DOORSTEP:
            continue
        for target, line in imported(tree_of(path), module):
            if target.split(".")[0] not in known:  # a public name such as shardwise.__version__
                target = ""
            source, goal = room_of(module), room_of(target)
            if goal and goal != source:
                yield source, goal, f"{path.relative_to(SOURCE)}:{line}"


def complaint(source: str, goal: str) -> str | None:
    """Why room `source` may not import room `goal`; None where it may."""
    if source == BESIDE:
        return None if goal in ("task", "errors") else "models import only task and errors"
    if goal == BESIDE:
        return None if source in MAY_IMPORT_MODELS else "only the rooms on top use the reference models"
    if source == "parallel" or goal == "parallel":
        return "import a technique's own room, not the package"
    if FLOORS[goal] < FLOORS[source] or (source, goal) in WITHIN:
        return None
    if source.startswith("parallel.") and goal == SHARED:
        return None
    side = "same" if FLOORS[goal] == FLOORS[source] else "higher"
    return f"{goal} is on floor {FLOORS[goal]}, the {side} one seen from {source} on floor {FLOORS[source]}"


def test_every_room_has_a_floor() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py")} | {p.parent.name for p in SOURCE.glob("*/__init__.py")}
    techniques = {f"parallel.{path.stem}" for path in SOURCE.glob("parallel/*.py")} - {"parallel.__init__"}
    techniques |= {f"parallel.{path.parent.name}" for path in SOURCE.glob("parallel/*/__init__.py")}
    rooms = (modules - DOORSTEP - {"parallel", BESIDE}) | techniques
    assert not rooms - FLOORS.keys(), "give the new room a floor here and in docs/design.md"


def test_the_design_page_has_one_short_row_for_each_room() -> None:
    page = (SOURCE.parents[1] / "docs" / "design.md").read_text()
    assert len(page.split()) <= 4500, "what a room does in detail belongs into its docstrings"
    rows = re.findall(r"^\| (\d|beside) \| `([\w.]+)/?` \| (.+) \|$", page, re.MULTILINE)
    assert {room: floor for floor, room, _ in rows} == {**{r: str(f) for r, f in FLOORS.items()}, BESIDE: "beside"}
    assert len(rows) == len(FLOORS) + 1
    assert not [room for _, room, text in rows if len(text.split()) > 25]


def test_a_room_imports_from_lower_floors_only() -> None:
    found = [(where, why) for source, goal, where in all_imports() if (why := complaint(source, goal))]
    assert not found, "\n".join(f"{where}: {why}" for where, why in found)


def test_the_check_can_fail() -> None:
    assert complaint("parallel.flat", "parallel.full")
    assert complaint("parallel.flat", "engine")
    assert complaint("layout", "comm")
    assert complaint("comm", "mesh")
    assert complaint("data", "training")
    assert complaint("engine", "models")
    assert complaint("models", "layout")
    assert list(imported(ast.parse("def f():\n    from shardwise.engine import engine"), "x")) == [("engine", 2)]
    assert list(imported(ast.parse("from shardwise import comm"), "x")) == [("comm", 1)]


def test_allowances_within_a_floor_are_all_in_use_or_in_order() -> None:
    used = {(source, goal) for source, goal, _ in all_imports()}
    unused = {pair for pair in WITHIN if pair not in used and FLOORS[pair[0]] != 7}
    assert not unused, f"drop what no room needs any more: {unused}"


def test_no_files_import_each_other_round_a_circle() -> None:
    """Imports for typing count, those inside functions do not; what a package re-exports is looked through."""
    paths = {".".join(p.relative_to(SOURCE.parent).with_suffix("").parts): p for p in SOURCE.rglob("*.py")}
    above = {name: beside for name, path in paths.items() if path.stem != "__init__"
             if (beside := files_imported(tree_of(path).body, paths))}  # fmt: skip
    while ends := [name for name, beside in above.items() if not beside & above.keys()]:
        for name in ends:
            del above[name]
    assert not above, f"these import each other, or those that do: {sorted(above)}"


def files_imported(body: list[ast.stmt], paths: dict[str, Path]) -> set[str]:
    """The files that statements outside of functions import, those under `if` and `try` too."""
    names = set[str]()
    for node in body:
        if isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)} & paths.keys()
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names} & paths.keys()
        elif isinstance(node, ast.If | ast.Try):
            names |= files_imported(node.body, paths)
    return names


@pytest.mark.parametrize("room", ["errors", "task", "layout", "config", "cluster"])
def test_floor_zero_knows_no_process_group(room: str) -> None:
    paths = [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else sorted((SOURCE / room).rglob("*.py"))
    for path in paths:
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("torch.distributed") for name in names), path.name


ACCELERATORS = {"cuda", "hip", "xpu", "mps", "npu", "hpu", "mtia", "nccl"}
# the room itself, and how this torch was built
NAMING = {"device.py", "cli/doctor.py"}


def kinds_named(path: Path) -> Iterator[str]:
    """Where a module asks for a kind of accelerator: `torch.cuda`, "cuda", or a device's type compared with a text."""
    for node in ast.walk(tree_of(path)):
        where = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and node.attr in ACCELERATORS:
            yield where
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = {word.partition(":")[0] for word in node.value.split(",")}
            if words & ACCELERATORS:
                yield where
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "type":
            texts = [to.value for to in node.comparators if isinstance(to, ast.Constant)]
            if texts and texts != ["meta"]:
                yield where


def may_name(path: Path) -> bool:
    """Whether `kinds_named` could find something: all other files need not be walked through."""
    return re.search(rf"\b({'|'.join(ACCELERATORS)})\b|\.type\b", path.read_text()) is not None


def test_only_the_device_room_knows_kinds_of_accelerators() -> None:
    """`cluster`, `costs` and what a probe writes describe devices by a kind and a library, which are data."""
    rooms = [path for path in sorted(SOURCE.rglob("*.py")) if str(path.relative_to(SOURCE)) not in NAMING]
    rooms = [path for path in rooms if may_name(path)]
    found = [where for path in rooms for where in kinds_named(path)]
    assert all(where.startswith(("cluster/", "costs/", "measure/machine.py:")) for where in found), found


# --- names


def test_no_two_public_classes_share_a_name() -> None:
    where: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


# --- the door


def test_import_brings_the_standard_library_alone() -> None:
    """What makes it quick: no other package, and few modules of its own."""
    program = "import sys; before = set(sys.modules); import shardwise; print(*(set(sys.modules) - before))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    brought = ran.stdout.split()
    assert {name.split(".")[0] for name in brought} <= {*sys.stdlib_module_names, "shardwise"}
    assert sum(name.startswith("shardwise") for name in brought) < 10


def test_import_and_plans_do_without_torch() -> None:
    program = (
        "import sys; from shardwise import Plan, Task, Source, InputError; from shardwise.ranks import RankPool;"
        "Plan.parse('dp_shard=2'); assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_public_names_are_few_and_exist() -> None:
    assert len(shardwise.__all__) <= 25
    assert all(getattr(shardwise, name) is not None for name in shardwise.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = shardwise.trian


def test_files_that_a_first_line_names_exist() -> None:
    files = {f"/{path.relative_to(SOURCE).with_suffix('')}": path for path in SOURCE.rglob("*.py")}
    places = tuple({*files, *(str(Path(name).parent) for name in files)})
    gone = []
    for name, path in files.items():
        first = (ast.get_docstring(tree_of(path)) or "").partition("\n")[0]
        named = re.findall(r"(?<![\w`./])(?!docs/)[a-z_]+(?:/[a-z_]+)+(?![\w/])", first)
        gone += [(name, told) for told in named if not any(place.endswith(f"/{told}") for place in places)]
    assert not gone
