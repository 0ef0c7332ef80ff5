"""Resolves the task that a command or a function was given (a name, a file, an object) to a `Task`.

    Task, or a function that returns one    itself, or its result
    text, digits                            a built-in task at its default sizes
    my.toml                                 the task that the configuration file describes
    a folder with a config.json             a task of transformers' model, on the files that [task] names
    module:name                             from the Python path or the current folder

The module may also be the path of a file, as in `examples/moons.py:task`. An error in the user's module becomes a
message of one line with its file and line.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardwise.errors import InputError, ShardwiseError, did_you_mean, nearest, rebuilt
from shardwise.python_seeds import python_restored, seed_python
from shardwise.task import Task
from shardwise.task_files import looked_in, which_task

if TYPE_CHECKING:
    from shardwise.config.schema import LoraSection, TaskSection

MOST_CHARACTERS = 500  # of a user's exception that are quoted in a message
GUARD = 'under `if __name__ == "__main__":`'
_under_way: list[str] = []  # tasks whose files are being imported


def resolve_task(named: Task | str | Callable[[], Task], section: TaskSection | None = None) -> Task:
    """Returns the `Task` of an object, a function or a name, as in the module's docstring.

    section   [task] of a configuration, for a built-in task or a folder; None: the defaults

    Raises `InputError` for a name that is not found, code that fails when it is imported or called (shardwise's own
    errors keep their class), and results that are no `Task`.
    """
    if not isinstance(named, str):
        return call_task(getattr(named, "__name__", type(named).__name__), named)
    from shardwise.config import load
    from shardwise.config.schema import BUILTIN_DEFAULTS, BUILTINS, FOLDER, TaskSection, is_folder

    # a configuration names a task and its sizes, and may put adapters on it
    if named.endswith(".toml"):
        config = load(named).config
        if config.lora.rank is not None:
            from shardwise.adapters import with_lora

            return with_lora(resolve_task(config.task.name, config.task), config.lora)
        section, named = config.task, config.task.name
    if named in BUILTINS:
        section = section or TaskSection.model_validate({"name": named, **BUILTIN_DEFAULTS[named]["task"]})
        module_name, _, attribute = BUILTINS[named].rpartition(":")
        return getattr(importlib.import_module(module_name), attribute)(section)
    if is_folder(named):
        module_name, _, attribute = FOLDER.rpartition(":")
        return getattr(importlib.import_module(module_name), attribute)(section or TaskSection(name=named))
    return _of_module(named)


@dataclass(frozen=True)
class AdaptedTask:
    """A function that returns a task with adapters in its model; it can be pickled.

    reference   the task, as `resolve_task` takes it; `section`: [lora] of a configuration
    """

    reference: Any
    section: LoraSection

    def __call__(self) -> Task:
        from shardwise.adapters import with_lora

        return with_lora(resolve_task(self.reference), self.section)


def refuse_while_imported(what: str) -> None:
    """Raises `InputError` if a task's file is being imported, and so calls `what` (a function's name) at import."""
    if _under_way:
        raise InputError(f"its file calls {what} as it is imported, as every rank does: put that {GUARD}")


def _of_module(name: str) -> Task:
    """Returns the task named "module:name" or "file.py:name"; raises as `resolve_task` does."""
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute or module_name.endswith((".ipynb", ":")):
        raise InputError(f"task {name!r}: {which_task(name)}")
    module = _import(name, module_name)
    return call_task(name, _attribute(name, module, attribute))


def _import(task: str, name: str) -> ModuleType:
    """Imports a module by the path of its file or by its name, and returns it.

    task   name of the task, for messages

    Raises `InputError` if it cannot be imported, changes the working folder, or another module has its name.
    """
    folder, file = Path.cwd(), None
    # a path: its folder is put on sys.path, and the file imported by its stem
    if name.endswith(".py"):
        file = Path(name)
        if file.is_dir():
            raise InputError(f"task {task!r}: {name} is a folder: give a file in it, as {file / 'file.py'}:task")
        if not file.is_file():
            near = did_you_mean(file.name, sorted(p.name for p in file.parent.glob("*.py")))
            raise InputError(f"task {task!r}: there is no file {name}{looked_in(file)}{near}")
        folder, name = file.resolve().parent, file.stem
    # "mine/tasks" without .py
    elif Path(f"{name}.py").is_file() and "/" in name:
        raise InputError(f"task {task!r}: the path of a file ends in .py: {task.replace(name, name + '.py')}")
    elif Path(name).is_file():
        raise InputError(f"task {task!r}: the file {name} does not end in .py, as a module must")
    # the file's own folder, as for a script, so that it can import modules beside it
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    stood = Path.cwd()
    try:
        _under_way.append(task)
        with _drawn_alike():
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        # distinguish a missing task module from a missing module that it imports
        if name == missing or name.startswith(missing + "."):
            raise InputError(f"task {task!r}: there is no module {missing!r}{_like_modules(missing)}") from None
        raise InputError(f"task {task!r}: {where(error)}") from error
    except SystemExit as error:
        place = where(error).rpartition(": SystemExit")[0]
        raise InputError(
            f"task {task!r}: {place} ended itself as it was imported, with exit code {error.code}: what reads a "
            f"command line, or runs, goes {GUARD}"
        ) from error
    except Exception as error:
        raise _task_error(task, "importing it failed", error) from error
    finally:
        _under_way.pop()
    # ranks would resolve relative paths differently
    if (now := Path.cwd()) != stood:
        os.chdir(stood)
        raise InputError(
            f"task {task!r}: importing it changes the working folder to {now} (os.chdir), and paths of this command "
            f"are relative to {stood}: leave it out and give paths by Path(__file__).parent, or start in that folder"
        )
    found = getattr(module, "__file__", None)
    # another module of that name was imported before (the user's file is called `random.py`)
    if file is not None and (found is None or not file.samefile(found)):
        of = f" ({found})" if found else ""
        raise InputError(f"task {task!r}: another module is called {name} too{of}: give the file another name")
    return module


@contextmanager
def _drawn_alike() -> Iterator[None]:
    """Context in which torch's, numpy's and Python's RNGs are seeded with 0; afterwards they are restored.

    Code that makes a task's data without a seed then gets the same random numbers in every process.
    """
    import torch

    with torch.random.fork_rng(devices=[]), python_restored():
        torch.manual_seed(0)
        seed_python(0)
        yield


def _like_modules(name: str) -> str:
    known = sorted({module.name for module in pkgutil.iter_modules([str(Path.cwd())])})
    near = did_you_mean(name, known)
    return near or f" on the Python path or in {Path.cwd()}"


def _attribute(task: str, module: ModuleType, path: str) -> Any:
    """Returns the object at a dotted path in a module; `InputError` that suggests a similar name if there is none."""
    value: Any = module
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            near = did_you_mean(name, [other for other in dir(value) if not other.startswith("_")])
            raise InputError(f"task {task!r}: {module.__name__} has no {name!r}{near}") from None
    return value


def call_task(task: str, value: Any) -> Task:
    """Returns `value` if it is a `Task`, else the task that the function `value` returns.

    task   name of the task, for messages

    A task without a name is named after its function, or after the module if the function is called `task`. Raises as
    `resolve_task` does.
    """
    if isinstance(value, Task):
        return value
    # a common mistake: the model's class, which is callable too
    if inspect.isclass(value) and not issubclass(value, Task):
        raise InputError(
            f"task {task!r}: is a class; write a function that returns Task(model={value.__name__}, ...) and give that"
        )
    if not callable(value):
        raise InputError(
            f"task {task!r}: is of type {type(value).__name__}; expected a Task, or a function that takes "
            "nothing and returns one"
        )
    # checked before the call, whose TypeError would look like the function's own
    needs = _arguments(value)
    if needs:
        raise InputError(f"task {task!r}: takes {', '.join(needs)}; it is called with nothing: give them defaults")
    try:
        with _drawn_alike():
            made = value()
    except (Exception, SystemExit) as error:
        raise _task_error(task, "calling it failed", error) from error
    if not isinstance(made, Task):
        raise InputError(f"task {task!r}: returned {type(made).__name__}, not a shardwise.Task")
    name = getattr(value, "__name__", "task")
    if name == "task":  # the most common name, so the module's says more
        name = _stem(getattr(value, "__module__", "")) or name
    return made.with_(name=name) if made.name == "task" and name.isidentifier() else made


def _stem(module: str) -> str:
    """Returns the last part of a module's name; for `__main__` the stem of its file."""
    file = getattr(sys.modules.get("__main__"), "__file__", None) if module == "__main__" else None
    return Path(file).stem if file else module.rpartition(".")[2]


def _arguments(function: Any) -> list[str]:
    """Returns the names of a function's arguments without a default; [] if it has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _task_error(task: str, what: str, error: BaseException) -> ShardwiseError:
    """Returns the error to raise for a failing task: shardwise's own with its class, any other as an `InputError`.

    task, what   for the message: the task's name, and what failed
    """
    if isinstance(error, ShardwiseError):
        return rebuilt(type(error), f"task {task!r}: {error}")
    return InputError(f"task {task!r}: {what}: {where(error)}{_meant(error) or _at_import(error)}")


def _at_import(error: BaseException) -> str:
    """Returns advice on an error at import: a relative import, or `init_process_group`; "" for any other error."""
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "; name a file of a package as package.module:task, in the folder that holds the package"
    if any(frame.name == "init_process_group" for frame in traceback.extract_tb(error.__traceback__)):
        return "; leave init_process_group out: each rank has joined the others before the task is asked for"
    return ""


def _meant(error: BaseException) -> str:
    """Returns a hint on an unknown keyword of `Task`: the nearest field or configuration key; "" for other errors."""
    match = re.search(r"^Task\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    names = [field.name for field in fields(Task)]
    return (did_you_mean(match[1], names) or _configured(match[1]) or f" (known: {', '.join(names)})") if match else ""


def _configured(word: str) -> str:
    """Returns a hint that a configuration key similar to `word` sets it, and not `Task`; "" if none is similar."""
    from shardwise.config.effective import keys

    own = [key for key in keys() if "." in key and not key.startswith("plan.")]
    sets = {part: key for key in reversed(own) for part in key.split(".")}  # a section by its first key
    near = nearest(word, sets)
    return f"; the configuration sets it, not the task: --set {sets[near]}=..." if near else ""


def where(error: BaseException, *, own_alone: bool = False) -> str:
    """Returns an error in one line, `tasks.py:12: ValueError: message`, with the innermost line of the user's code.

    own_alone   Whether to give no line if none is in the user's code, instead of the innermost line of any code
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    message = " ".join(str(error).split()) or "(no message)"
    if len(message) > MOST_CHARACTERS:  # such as a printed tensor
        message = f"{message[: MOST_CHARACTERS - 100]} ... {message[-100:]}"
    text = f"{type(error).__name__}: {message}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)] or ([] if own_alone else list(frames))
    return f"{own[-1].filename}:{own[-1].lineno}: {text}" if own else text


def inputs_hint(error: BaseException) -> str:
    """Returns a hint on `Task.inputs` if the model was apparently called with wrong arguments; else ""."""
    if isinstance(error, TypeError) and "argument" in str(error) and "numpy" not in str(error):
        return (
            ". If the batch holds more than the model's arguments, give Task.inputs (batch -> args, kwargs), "
            "as lambda batch: ((what the model takes,), {})"
        )
    return ""


def where_in_text(trace: str) -> str:
    """Returns `tasks.py:12`, the innermost line of user code (else of any) in a traceback's text; "" if it has none."""
    places = re.findall(r'File "([^"]+)", line (\d+)', trace)
    own = [place for place in places if not _is_library(place[0])] or places
    return ":".join(own[-1]) if own else ""


def is_own(file: str) -> bool:
    """Whether a file is the user's own code, and of no installed library or shardwise."""
    return not _is_library(file)


def _is_library(file: str) -> bool:
    ours = str(Path(__file__).parents[1])
    return file.startswith((sysconfig.get_path("stdlib"), ours, "<")) or "site-packages" in file
