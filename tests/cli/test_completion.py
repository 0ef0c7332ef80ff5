"""Completion: what each place of a command line may become, alone and in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mistakes import TASKS

from shardwise.cli.completion import SCRIPTS, candidates, plan_words
from shardwise.cli.main import call, main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(TASKS)
    (tmp_path / "apart").mkdir()
    (tmp_path / "run.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


LINES = [
    ("", "verify", "train"),
    ("ver", "verify", None),
    ("show s", "schedule", "ranks"),
    ("train --pl", "--plan", "--steps"),
    ("train --plan dp_s", "dp_shard=", "zero="),
    ("train --plan dp_shard=2,ze", "dp_shard=2,zero=", "dp_shard=2,dp_shard="),
    ("train --plan dp_shard=2,zero=", "dp_shard=2,zero=3", "dp_shard=2,zero=4"),
    ("verify text --plan precision=bf", "precision=bf16", "precision=fp32"),
    ("show schedule pp=4,schedule=zb", "", None),
    ("train --set train.st", "train.steps=", "optimizer.lr="),
    ("train m", "mine.py:", "text"),
    ("train mine.py:no_w", "mine.py:no_weight", "mine.py:nan"),
    ("train mine:no_w", "mine:no_weight", "mine:nan"),
    ("train t", "text", "digits"),
    ("train r", "run.toml", "mine.py:"),
    ("train a", "apart/", None),
    ("plan llama-3", "llama-3-8b", "gpt-2-small"),
    ("plan llama-3-8b --cluster '2x8 h1", "2x8 h100-sxm-80gb", None),
    ("plan llama-3-8b --software ne", "nemo", "shardwise"),
    ("completion f", "fish", "bash"),
]


@pytest.mark.parametrize(("text", "offered", "kept_out"), LINES)
def test_a_place_of_a_line_is_completed_by_what_it_takes(text, offered, kept_out, folder):
    from shardwise.cli.completion import _words

    found = candidates(main, _words(text))
    assert not offered or offered in found
    assert kept_out not in found or kept_out is None or not text


def test_every_key_of_a_plan_is_offered_and_what_is_offered_is_read():
    from shardwise import Plan

    keys = [word.removesuffix("=") for word in plan_words("") if word.endswith("=")]
    assert set(keys) == set(Plan.__dataclass_fields__)
    for key in keys:
        for value in plan_words(f"{key}="):
            assert Plan.parse(value)


def test_completion_imports_nothing_heavy(folder):
    program = (
        "import os, sys\nfrom shardwise.cli.completion import candidates\nfrom shardwise.cli.main import main\n"
        "lines = ['train', 'mine.py:'], ['plan', ''], ['plan', 'x', '--cluster', '1x8 '], ['train', '--plan', '']\n"
        "for words in lines:\n"
        "    assert candidates(main, words)\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_of_a_shell_is_written_and_the_command_ends_well(shell, capfd):
    assert call(["completion", shell]) == 0
    assert "_SHARDWISE_WORDS" in capfd.readouterr().out


# --- in the shells themselves

ASK = {
    "bash": (
        'eval "$(shardwise completion bash)"\n'
        "ask() { COMP_LINE=\"$1\"; COMP_POINT=${#1}; COMP_WORDBREAKS=$' \\t\\n\"\\'><=;|&(:'; _shardwise shardwise; "
        'printf "%s\\n" "${COMPREPLY[@]}"; }\n'
        "ask 'shardwise ver'\nask 'shardwise train --plan dp_shard=2,ze'\nask 'shardwise train mine.py:no_w'\n",
        ["verify ", "2,zero=", "no_weight "],
    ),
    "zsh": (
        'compdef() { :; }\neval "$(shardwise completion zsh)"\n'
        "compadd() { while [[ $1 != -- ]]; do shift; done; shift; print -l -- $@; }\n"
        "ask() { words=($@); CURRENT=$#words; _shardwise; }\n"
        "ask shardwise ver\nask shardwise train --plan dp_shard=2,ze\nask shardwise train mine.py:no_w\n",
        ["verify", "dp_shard=2,zero=", "mine.py:no_weight"],
    ),
    "fish": (
        "shardwise completion fish | source\ncomplete -C 'shardwise ver'\n"
        "complete -C 'shardwise train --plan dp_shard=2,ze'\ncomplete -C 'shardwise train mine.py:no_w'\n",
        ["verify", "dp_shard=2,zero=", "mine.py:no_weight"],
    ),
}


@pytest.mark.parametrize("shell", ASK)
def test_a_real_shell_completes_names_keys_and_tasks(shell, folder):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    (folder / "bin").mkdir()
    command = folder / "bin" / "shardwise"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardwise "$@"\n')
    command.chmod(0o755)
    program, wanted = ASK[shell]
    environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}
    arguments = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [shell, *arguments, "-c", program], cwd=folder, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.split("\n") if line] == wanted


def test_the_commands_of_the_page_are_those_that_are_tested():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    from shardwise.cli.completion import INSTALL

    assert all(line.partition("  #")[0] in page for line in INSTALL.values())
