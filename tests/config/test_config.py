"""Configurations: strictness, all mistakes at once, precedence and provenance, and texts that load again."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from shardwise.config import Config, Given, load, show, starter
from shardwise.config.effective import keys
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.layout.plan import TOLD


@pytest.fixture
def write(tmp_path):
    """`write("a.toml", text)` -> path."""

    def write_file(name: str, text: str):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def mistakes(*args, **kwargs) -> list[str]:
    with pytest.raises(InputError) as caught:
        load(*args, **kwargs)
    return str(caught.value).splitlines()[1:]


# --- one mistake


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.stepz=3", "did you mean 'train.steps'?"),
        ("train.lr=3", "did you mean 'optimizer.lr'?"),
        ("checkpoint.every=3", "did you mean 'train.checkpoint_every'?"),
        ("trian.steps=3", "did you mean 'train'?"),
        ("task.model.width=3", "(known: layers, hidden, heads"),
        ("plan.dp_shrad=2", "did you mean 'dp_shard'?"),
        ("plan=dp_shrad=2", "did you mean 'dp_shard'?"),
        ("train.steps=ten", "expected a whole number"),
        ("train.steps=1.5", "expected a whole number"),
        ("train.steps=0", "expected a number greater than or equal to 1"),
        ("train.steps=true", "expected a whole number"),
        ("train.batch_tokens=64x", 'or text such as "64k"'),
        ("train.batch_tokens=300", "expected a multiple of task.seq_len = 256"),
        ("train.name=a/b", "expected letters"),
        ("optimizer.lr=-1", "expected a number greater than 0"),
        ("optimizer.lr=nan", "expected a finite number"),
        ("optimizer.name=adamv", "did you mean 'adam'?"),
        ("optimizer.betas=[0.9]", "expected two numbers"),
        ("optimizer.scale_lr=linear", "optimizer.base_batch is not set"),
        ("optimizer=adamw", "expected a table"),
        ("task.name=tex", "did you mean 'text'?"),
        ("task.model.hidden=30", "expected a multiple of task.model.heads = 4"),
        ("task.model.kv_heads=3", "expected a divisor of task.model.heads = 4"),
        ("plan.dp_shard=two", "expected a whole number of at least 1"),
        ("plan.zero=4", "expected 0, 1, 2 or 3"),
        ("plan.compile=1", "expected true or false"),
        ("plan.wrap=3", "expected class names"),
        ("plan.precision=fp31", "did you mean 'fp32'?"),
        ("plan=dp_shard", "expected key=value"),
        ("plan=3", "expected a table, or text"),
        ("train.steps", "expected key=value"),
        ("train.steps=", "expected key=value"),
        ("=3", "expected key=value"),
        ("train..steps=3", "an empty part between its dots"),
        ("train.out=[1", "is not a TOML value"),
    ],
)
def test_each_mistake_names_its_source_and_what_was_expected(override, told):
    (line,) = mistakes(None, [override])
    assert told in line
    assert "--set" in line or "not set" in line


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["optimizer.momentum=0.9"], "adamw does not read it"),
        (["optimizer.base_batch=32"], "scale_lr is none"),
        (["schedule.final_factor=0.1"], "does not decay"),
        (["schedule.name=cosine", "schedule.decay_steps=3"], "cosine decays over all steps"),
        (["task.name=digits", "task.seq_len=9"], "only the text task"),
        (["task.name=digits", "train.batch_tokens=512"], "only the text task counts tokens"),
        (["task.name=digits", "train.generate=9"], "only the text task writes"),
        (["task.name=my:task", "task.model.layers=9"], "sizes in its code"),
        (["train.eval_every=0", "train.eval_samples=9"], "eval_every is 0"),
    ],
)
def test_a_key_that_would_have_no_effect_is_a_mistake(overrides, told):
    (line,) = mistakes(None, overrides)
    assert "would have no effect" in line and told in line


def test_keys_that_exclude_each_other_are_mistakes():
    assert all("give one of them" in line for line in mistakes(None, ["train.steps=3", "train.epochs=1"]))
    assert all(
        "give one of them" in line for line in mistakes(None, ["train.batch_samples=3", "train.batch_tokens=512"])
    )


def test_a_key_told_twice_is_a_mistake():
    assert "is set twice" in mistakes(None, ["train.seed=1", "train.seed=2"])[0]
    assert "train.seed is set twice" in mistakes(None, ["train.seed=1", "train={seed = 2}"])[0]
    assert "is given by --steps too" in mistakes(None, ["train.steps=3"], [Given("train.steps", 2, "--steps")])[0]


# --- files


def test_all_mistakes_are_told_at_once_each_with_its_file(write):
    write("base.toml", '[optimizer]\nlrr = 1\n[plan]\ndp_shard = "2"\n')
    path = write("run.toml", 'extends = "base.toml"\n[train]\nsteps = "ten"\n[trian]\nseed = 1\n')
    lines = mistakes(path, ["train.seed=-1", "train.log_every"])
    assert len(lines) == 6
    assert sum("base.toml" in line for line in lines) == 2
    assert sum("run.toml" in line for line in lines) == 2
    assert sum("--set" in line for line in lines) == 2


def test_a_missing_file_names_a_like_one(write):
    path = write("mine.toml", "")
    assert "did you mean 'mine.toml'?" in mistakes(path.with_name("mime.toml"))[0]


def test_broken_files(write):
    assert "is not TOML" in mistakes(write("a.toml", "[train\n"))[0]
    assert "not UTF-8" in mistakes_of_bytes(write)
    assert "which" in mistakes(write("b.toml", 'extends = "nowhere.toml"'))[0]
    assert "expected the path" in mistakes(write("c.toml", "extends = 3"))[0]


def mistakes_of_bytes(write) -> str:
    path = write("bytes.toml", "")
    path.write_bytes(b"\xff\xfe")
    return mistakes(path)[0]


def test_a_link_to_itself_is_told(tmp_path):
    link = tmp_path / "a.toml"
    link.symlink_to(link)
    assert "cannot be read" in mistakes(link)[0]


def test_extends_in_a_circle_is_refused(write):
    write("a.toml", 'extends = "b.toml"')
    write("b.toml", 'extends = "a.toml"')
    (line,) = mistakes(write("c.toml", 'extends = "a.toml"'))
    assert "extends goes in a circle" in line


def test_precedence_and_provenance(write, tmp_path):
    (tmp_path / "below").mkdir()
    write("below/base.toml", "[train]\nseed = 1\nlog_every = 1\nsteps = 1\n[optimizer]\nlr = 1\n[plan]\ndp_shard = 2\n")
    path = write("run.toml", 'extends = "below/base.toml"\n[train]\nlog_every = 2\nsteps = 2\n[plan]\naccumulate = 2\n')
    effective = load(path, ["optimizer.lr=3e-4"], [Given("train.steps", 3, "--steps")])
    train = effective.config.train
    assert (train.seed, train.log_every, train.steps, effective.config.optimizer.lr) == (1, 2, 3, 3e-4)
    assert effective.source("train.seed").endswith("base.toml")
    assert effective.source("train.log_every").endswith("run.toml")
    assert effective.source("train.steps") == "--steps"
    assert effective.source("optimizer.lr") == "--set"
    assert effective.source("train.out") == "default"
    assert effective.plan == Plan(dp_shard=2, accumulate=2)


def test_a_plan_text_replaces_a_plan_table_and_a_key_adds_to_it(write):
    path = write("run.toml", "[plan]\ndp_shard = 2\naccumulate = 4\n")
    effective = load(path, ["plan.accumulate=3"], [Given("plan", "dp_replicate=2", "--plan")])
    assert effective.plan == Plan(dp_replicate=2, accumulate=3)
    assert effective.source("plan.dp_shard") == "default"


def test_a_plan_file_is_relative_to_the_file_that_names_it(write, tmp_path):
    (tmp_path / "below").mkdir()
    write("below/plan.toml", Plan(dp_shard=2, zero=2).to_toml())
    effective = load(write("below/run.toml", 'plan = "plan.toml"'))
    assert effective.plan == Plan(dp_shard=2, zero=2)
    assert effective.source("plan.zero").endswith("plan.toml")


def test_a_stronger_source_may_make_a_weaker_one_idle_and_says_so(write):
    path = write("run.toml", "[train]\nepochs = 2\n[schedule]\nname = 'cosine'\nfinal_factor = 0.1\n")
    effective = load(path, ["schedule.name=constant"], [Given("train.steps", 3, "--steps")])
    assert effective.config.train.epochs is None and effective.config.schedule.final_factor == 0.0
    idle = [note for note in effective.notes if "has no effect" in note]
    assert len(idle) == 2


# --- values


def test_counts_have_binary_suffixes():
    effective = load(None, ["train.batch_tokens=64k", "optimizer.scale_lr=sqrt", "optimizer.base_batch=1M"])
    assert effective.config.train.batch_tokens == 64 * 1024
    assert effective.config.optimizer.base_batch == 1024**2


def test_set_reads_toml_values_bare_words_and_tables():
    effective = load(None, ["optimizer.betas=[0.8, 0.9]", "train.name=first-try", "optimizer={name='adam', lr=1}"])
    assert effective.config.optimizer.betas == [0.8, 0.9]
    assert effective.config.train.name == "first-try"
    assert (effective.config.optimizer.name, effective.config.optimizer.lr) == ("adam", 1.0)


def test_the_users_own_optimizer_runs_unless_the_section_is_set():
    assert load(None, ["task.name=my:task"]).own_optimizer
    assert not load(None, ["task.name=my:task", "optimizer.lr=1"]).own_optimizer
    assert load(None, ["task.name=my:task", "optimizer.scale_lr=linear", "optimizer.base_batch=4"]).own_optimizer
    assert not load(None, ["task.name=text"]).own_optimizer


# --- texts


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["task.name=digits", "task.model.patch=4"],
        ["task.name=my:task", "train.seed=3"],
        ["task.name=my:task", "optimizer.name=sgd", "optimizer.momentum=0.9"],
        ["task.name=my:task", "optimizer.scale_lr=linear", "optimizer.base_batch=4", "train.sinks=[wandb]"],
        ["schedule.name=wsd", "schedule.decay_steps=3", "train.batch_tokens=4k", "train.epochs=0.5"],
        ["plan=dp_shard=2,zero=3,precision=bf16,wrap=Block|Other", "optimizer.betas=[0.8, 0.9]"],
    ],
)
def test_what_is_shown_loads_as_the_same_configuration(overrides, write):
    effective = load(None, overrides)
    again = load(write("shown.toml", show(effective)))
    assert (again.config, again.plan) == (effective.config, effective.plan)
    assert again.own_optimizer == effective.own_optimizer


def test_every_line_shown_tells_where_its_value_came_from():
    text = show(load(None, ["optimizer.lr=3e-4", "plan=dp_shard=2"]))
    assert re.search(r"^lr = 0.0003 +# --set$", text, re.M)
    assert re.search(r"^dp_shard = 2 +# --set$", text, re.M)
    assert re.search(r"^seed = 0 +# default$", text, re.M)


def test_the_starter_loads_and_holds_every_key(write):
    text = starter()
    effective = load(write("starter.toml", text))
    plain = load()
    assert (effective.config, effective.plan) == (plain.config, plain.plan)
    for key in keys():
        leaf = key.rpartition(".")[2]
        if key.startswith("plan.") and leaf not in TOLD:
            continue
        assert re.search(rf"^(# )?{leaf} =|^\[[a-z.]*{leaf}\]|extends =", text, re.M), key


def test_every_default_of_the_starter_is_the_default(write):
    """Each commented line, its `#` removed, changes nothing."""
    lines = starter().splitlines()
    table = ""
    for line in lines:
        if line.startswith("["):
            table = line.split("]")[0] + "]"
        found = re.match(r"# (\w+ = \S.*)$", line)
        if not found or not table:
            continue
        try:
            effective = load(write("one.toml", f"{table}\n{found[1]}\n"))
        except InputError as error:
            assert "would have no effect" in str(error)
            continue
        assert effective.config == load().config and effective.plan == load().plan, line


def test_every_field_is_described_and_the_plan_help_names_fields():
    def walk(model):
        for field in model.model_fields.values():
            if hasattr(field.annotation, "model_fields"):
                yield from walk(field.annotation)
            else:
                yield field.description

    assert all(walk(Config))
    assert set(TOLD) == {field.name for field in fields(Plan)}


def test_any_type_of_device_may_be_asked_for_and_has_to_be_there() -> None:
    from shardwise.training.job import _check_device

    with pytest.raises(InputError, match='device = "npu", but torch sees no accelerator on this machine'):
        _check_device("npu")
    with pytest.raises(InputError, match="device"):
        load(None, ["train.device=cuda:1"])
