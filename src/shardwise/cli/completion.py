"""Shell completion in bash, zsh and fish: commands, options, and values of options (`_values`).

A shell passes the words up to the cursor, and `candidates` completes the last one. Nothing slow is imported: tasks are
read from the text of a file, names of models and devices from the catalogue's tables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import click

SCRIPTS = {
    "bash": """_shardwise() {
    local IFS=$'\\n'
    COMPREPLY=($(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" COMP_BREAKS="$COMP_WORDBREAKS" \\
        _SHARDWISE_WORDS=bash "$1" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" != *[=,:/] ]] && COMPREPLY[0]+=" "
}
complete -o nospace -F _shardwise shardwise
""",
    "zsh": """#compdef shardwise
_shardwise() {
    local -a open whole
    local word
    for word in "${(@f)$(COMP_LINE="${(j: :)words[1,CURRENT]}" _SHARDWISE_WORDS=zsh "${words[1]}" 2>/dev/null)}"; do
        [[ -z "$word" ]] && continue
        if [[ "$word" == *[=,:/] ]]; then open+=("$word"); else whole+=("$word"); fi
    done
    (( $#open )) && compadd -Q -U -S '' -- $open
    (( $#whole )) && compadd -Q -U -- $whole
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _shardwise "$@"; else compdef _shardwise shardwise; fi
""",
    "fish": """complete -c shardwise -f -a '(COMP_LINE=(commandline -cp) _SHARDWISE_WORDS=fish shardwise 2>/dev/null)'
""",
}
INSTALL = {
    "bash": 'eval "$(shardwise completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(shardwise completion zsh)"    # in ~/.zshrc, after compinit',
    "fish": "shardwise completion fish | source     # in ~/.config/fish/config.fish",
}
ASKED = "_SHARDWISE_WORDS"  # environment variable with the name of the shell that asks for completions


@click.command()
@click.argument("shell", type=click.Choice(list(SCRIPTS)))
def completion(shell: str) -> None:
    """Write what makes a shell complete this command's words: names, keys of plans, tasks in a file.

    \b
    eval "$(shardwise completion bash)"      bash, in ~/.bashrc
    eval "$(shardwise completion zsh)"       zsh, in ~/.zshrc
    shardwise completion fish | source       fish, in ~/.config/fish/config.fish
    """
    click.echo(SCRIPTS[shell], nl=False)


def answer_shell(main: click.Group) -> None:
    """Prints the completions of the command line in COMP_LINE, one a line."""
    text = os.environ.get("COMP_LINE", "")
    text = text[: int(os.environ.get("COMP_POINT") or len(text))]
    words = _words(text)
    matches = candidates(main, words[1:])
    if os.environ[ASKED] == "bash":  # bash replaces only what follows the last "=" or ":"
        breaks = [re.escape(sign) for sign in "=:" if sign in os.environ.get("COMP_BREAKS", "")]
        place = max((match.end() for match in re.finditer("|".join(breaks), words[-1])), default=0) if breaks else 0
        matches = [match[place:] for match in matches]
    for match in matches:
        click.echo(match)


def _words(text: str) -> list[str]:
    """Returns the words of an unfinished command line; the last is "" after a space. Quotes need not be closed."""
    words: list[str] = []
    word, quote = "", ""
    for letter in text:
        if quote:
            # only the same quote ends a quoted text
            quote, word = ("", word) if letter == quote else (quote, word + letter)
        elif letter in "\"'":
            quote = letter
        elif letter.isspace():
            # repeated spaces make no empty words
            words, word = [*words, word] if word else words, ""
        else:
            word += letter
    return [*words, word]


def candidates(main: click.Group, words: list[str]) -> list[str]:
    """Returns completions of the last of `words`; the words before it give the command and option it belongs to."""
    command: click.Command = main
    *before, word = words or [""]
    option: click.Parameter | None = None
    taken = 0  # number of positional arguments before the last word
    for done in before:
        if option is not None:
            option = None
        elif done.startswith("-"):
            option = next(
                (param for param in command.params if done in param.opts and not getattr(param, "is_flag", 0)),
                None,
            )
        elif isinstance(command, click.Group):
            command = command.commands.get(done, click.Command(None))
            taken = 0
        else:
            taken += 1
    if option is not None:
        return _values(option, word)
    if word.startswith("-"):
        names = [name for param in command.params for name in (*param.opts, *param.secondary_opts)] + ["--help"]
        # only long spellings of options
        return sorted(name for name in names if name.startswith(word) and name.startswith("--"))
    if isinstance(command, click.Group):
        return sorted(name for name in command.commands if name.startswith(word))
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    # the last argument may take several words
    return _values(arguments[min(taken, len(arguments) - 1)], word) if arguments else []


def _values(parameter: click.Parameter, word: str) -> list[str]:
    """Returns the values of an option or argument that begin with `word`."""
    if isinstance(parameter.type, click.Choice):
        return [str(choice) for choice in parameter.type.choices if str(choice).startswith(word)]
    name = parameter.name or ""
    metavar = parameter.metavar or ""
    if name in ("plan", "plan_text", "plans", "fix"):
        return plan_words(word)
    if name == "overrides":
        return _override(word)
    if name == "cluster":
        return _cluster(word)
    if name == "software":
        from shardwise.costs.software import SOFTWARE

        return sorted(choice for choice in SOFTWARE if choice.startswith(word))
    if name == "precision":
        return _plan_values("precision", word)
    if name == "task" and metavar == "TASK":  # commands of forecasts also take models of the catalogue
        return [*_models(word), *_tasks(word, ())]
    if name in ("task", "target"):
        return _tasks(word, (".toml",) if name == "target" else ())
    return _files(word, ())


def plan_words(text: str) -> list[str]:
    """Returns completions of a plan's text: unused keys with "=", or values of the last key if it has a "="."""
    from shardwise.layout.plan import Plan

    head, part = text[: text.rfind(",") + 1], text[text.rfind(",") + 1 :]
    key, equals, value = part.partition("=")
    if equals:
        return [f"{head}{key}={choice}" for choice in _plan_values(key, value)]
    used = {pair.partition("=")[0] for pair in head.split(",")}
    fields = [name for name in Plan.__dataclass_fields__ if name.startswith(key) and name not in used]
    # instead of keys, a plan may be a file
    files = [path for path in _files(text, (".toml",)) if not path.endswith("/")] if not head else []
    return [f"{head}{name}=" for name in fields] + files


def _plan_values(key: str, value: str) -> list[str]:
    """Returns usual values of a plan's key that begin with `value`; [] if the key has none."""
    from shardwise.layout.plan import CHOICES, DEGREES, FLAGS

    choices: tuple[str, ...] = ()
    if key in CHOICES:
        choices = CHOICES[key]
    elif key in FLAGS:
        choices = ("true", "false")
    elif key == "zero":
        choices = ("0", "1", "2", "3")
    elif key in DEGREES:
        choices = ("2", "4", "8", "16", "32", "64")
    return [choice for choice in choices if choice.startswith(value)]


def _override(word: str) -> list[str]:
    from shardwise.config.effective import keys

    return [f"{key}=" for key in keys() if key.startswith(word)] if "=" not in word else []


def _cluster(word: str) -> list[str]:
    """Returns .toml files that begin with `word`, or after "16x8 " devices of the catalogue."""
    from shardwise.cluster.catalogue import device_names

    nodes, space, device = word.partition(" ")
    if space:
        return [f"{nodes} {name}" for name in device_names() if name.startswith(device)]
    return _files(word, (".toml",))


def _models(word: str) -> list[str]:
    from shardwise.cluster.catalogue import model_names

    return [name for name in model_names() if name.startswith(word)]


def _tasks(word: str, suffixes: tuple[str, ...]) -> list[str]:
    """Returns built-in tasks and files that begin with `word`, or after "mine.py:" or "mine:" the tasks of that file.

    suffixes   endings of files beside .py
    """
    from shardwise.task_files import BUILTIN, tasks_in

    file, colon, task = word.rpartition(":")
    if colon:
        # the file is given by its path or as a module; it is read as text, not imported
        path = file if file.endswith(".py") else f"{file.replace('.', '/')}.py"
        return [f"{file}:{name}" for name in tasks_in(path) if name.startswith(task)]
    files = [f"{path}:" if path.endswith(".py") else path for path in _files(word, (".py", *suffixes))]
    return [*(name for name in BUILTIN if name.startswith(word)), *files]


def _files(word: str, suffixes: tuple[str, ...]) -> list[str]:
    """Returns files and folders that begin with `word`, with one of the suffixes if given; folders end in a slash."""
    folder, _, start = word.rpartition("/")
    base = Path(folder + "/") if "/" in word else Path()
    try:
        entries = sorted(base.iterdir())
    except OSError:
        return []
    keep: Callable[[Path], bool] = lambda path: path.is_dir() or not suffixes or path.suffix in suffixes  # noqa: E731
    prefix = f"{folder}/" if "/" in word else ""
    named = [path for path in entries if path.name.startswith(start) and not path.name.startswith(".") and keep(path)]
    return [f"{prefix}{path.name}{'/' if path.is_dir() else ''}" for path in named]
