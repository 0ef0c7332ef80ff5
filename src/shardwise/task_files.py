"""Finds the tasks that a Python file defines by parsing its text, without importing it.

A task is a function that can be called without arguments and returns a value, or a variable assigned `Task(...)`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from shardwise.errors import did_you_mean

BUILTIN = ("text", "digits")
FEW = 12  # at most so many tasks are listed in a message


def tasks_in(path: str | Path) -> list[str]:
    """Returns the names of a file's tasks, in order; [] for a file that cannot be read or is not Python.

    If some functions build a `Task` themselves, only those are listed, since others may be helpers.
    """
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    makers, before = {"Task"}, 0
    while len(makers) > before:  # a function that calls one that makes a task makes one too
        before = len(makers)
        makers |= {node.name for node in functions if _makes_task(node, makers)}
    functions = [node for node in functions if _may_be_a_task(node)]
    sure = [node.name for node in functions if node.name in makers]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _calls(node.value, makers):
            sure += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return sure or [node.name for node in functions]


def defines_task(path: str | Path) -> bool:
    """Whether a file calls `Task(...)` anywhere; False for one that cannot be read or is not Python."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return False
    return any(_calls(node, {"Task"}) for node in ast.walk(tree) if isinstance(node, ast.Call))


def calls_prepare(path: str | Path) -> bool:
    """Whether a file calls `prepare`, as a script does; False for one that cannot be read or is not Python."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return False
    return any(_calls(node, {"prepare"}) for node in ast.walk(tree) if isinstance(node, ast.Call))


def _may_be_a_task(function: ast.FunctionDef) -> bool:
    """Whether a function is public, can be called without arguments, and returns a value."""
    taken = function.args
    needed = len(taken.posonlyargs) + len(taken.args) - len(taken.defaults) + taken.kw_defaults.count(None)
    own = [node for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    return not function.name.startswith("_") and needed == 0 and bool(own)


def _makes_task(function: ast.FunctionDef, makers: set[str]) -> bool:
    if function.returns is not None and "Task" in ast.unparse(function.returns):
        return True
    return any(isinstance(node, ast.Call) and _calls(node, makers) for node in ast.walk(function))


def _calls(call: ast.Call, names: set[str]) -> bool:
    """Whether a call is of a function or attribute with one of these names: `Task(...)`, `shardwise.Task(...)`."""
    function = call.func
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) in names


def which_task(name: str) -> str:
    """Returns advice for a task's name that cannot be resolved, such as `mine.py` in place of `mine.py:task`."""
    # known mistakes, from the most specific to the most general
    stem = name.removesuffix(":").removesuffix(".py")
    path = Path(f"{stem}.py")
    if not name.strip():
        return f"it is empty: give {', '.join(BUILTIN)}, file.py:task or module:task"
    if "::" in name:
        return f"one colon stands before the task: {name.replace('::', ':')}"
    if name.startswith(":"):
        return f"there is no file before the colon: give file.py{name}"
    if (file := name.partition(":")[0]).endswith(".ipynb"):
        return f"a notebook is no module: save it as a script (jupyter nbconvert --to script {file}) and give that"
    if is_run(Path(name)):
        return f"it is the folder of a run: --resume {name} goes on with it, --init-from {name} begins with its weights"
    if Path(name).is_dir():
        return f"it is a folder: give a file in it with its task, as {Path(name) / 'file.py'}:task"
    # a file without a task: list its tasks
    if ":" not in name.removesuffix(":") and path.is_file():
        tasks = tasks_in(path)
        if not tasks:
            return f"{path} has no function that takes nothing and returns a Task; write one and give {path}:its_name"
        more = f" and {len(tasks) - FEW} more" if len(tasks) > FEW else ""
        return f"say which task of {path}: " + ", ".join(f"{path}:{task}" for task in tasks[:FEW]) + more
    # a missing file, perhaps with a similar name
    if name.endswith(".py"):
        near = did_you_mean(path.name, sorted(module.name for module in path.parent.glob("*.py")))
        return f"there is no file {name}{looked_in(path)}{near}"
    if name.endswith((".yaml", ".yml", ".json")):
        return "a configuration is TOML: shardwise config --starter > my.toml writes one"
    # "folder.file.task" for "folder/file.py:task"
    before, dot, task = name.replace("/", ".").rpartition(".")
    beside = Path(before.replace(".", "/") + ".py")
    if dot and before and beside.is_file() and task in tasks_in(beside):
        return f"a colon stands before the task: {beside}:{task}"
    # a name of the Hugging Face hub, such as "meta-llama/Llama-3.1-8B"
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not Path(name).parent.is_dir():
        return f"nothing is fetched from a hub: hf download {name} --local-dir FOLDER, and give FOLDER"
    choices = [*BUILTIN, *(module.name for module in sorted(Path().glob("*.py")))]
    return f"expected {', '.join(BUILTIN)}, file.py:task or module:task{did_you_mean(name, choices)}"


def folder_above(path: Path) -> Path:
    """Returns the nearest folder above `path` that exists."""
    return next(above for above in path.absolute().parents if above.is_dir())


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run of `train` (it has config.toml and plan.toml)."""
    return (folder / "config.toml").is_file() and (folder / "plan.toml").is_file()


def looked_in(path: Path) -> str:
    """Returns " in FOLDER" for a relative path, to end a message on a missing file; "" for an absolute one."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"
