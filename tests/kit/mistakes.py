"""Mistakes that users make, and the words that the answer to each must end in. `mine.py` has the tasks that make them.

Each row: the command line, its exit code, and what the last line of its message must hold.
"""

from __future__ import annotations

TASKS = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import shardwise
from shardwise import Task

print("noise of the user's module")
NOT_A_TASK = 3


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.a = nn.Linear(width, 8)
        self.b = nn.Linear(8, 1)

    def forward(self, x):
        return self.b(self.a(x).relu())


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.blocks(x))


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8)
        self.b = nn.Linear(8, 1)

    def forward(self, x):
        return self.b(self.table(x)).mean(1)


class Huge(Net):
    def __init__(self):
        super().__init__()
        self.huge = nn.Linear(8, 20_000_000_000)


class Answers(Net):
    def forward(self, x):
        return {"logits": super().forward(x)}


class Forgets(Net):
    def forward(self, x):
        super().forward(x)


class Pair(Net):
    def forward(self, x):
        return super().forward(x), x


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.LazyLinear(1)


class Reads(Net):
    def __init__(self):
        super().__init__()
        self.table = torch.load("weights.pt")


class Nothing(nn.Module):
    def forward(self, x):
        return x


def loss(output, batch):
    return mse_loss(output, batch["y"], reduction="sum"), len(output)


def build(change=lambda x, y: (x, y), model=Net, loss=loss, samples=16, **more):
    def batch(step):
        x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(step))
        x, y = change(x, x[:, :1].sin())
        return {"x": x, "y": y}

    return Task(model=model, loss=loss, inputs=lambda b: ((b["x"],), {}), batch=batch, **more)


def at(tensor, index, value):
    tensor[index] = value
    return tensor


def good(): return build()
def blocks(): return build(model=Blocks)
def float64(): return build(lambda x, y: (x.double(), y))
def half(): return build(lambda x, y: (x.half(), y))
def integers(): return build(lambda x, y: ((x * 10).long(), y))
def nan(): return build(lambda x, y: (at(x, (5, 2), float("nan")), y))
def infinite(): return build(lambda x, y: (x, at(y, 3, float("inf"))))
def no_weight(): return build(loss=lambda o, b: (mse_loss(o, b["y"], reduction="sum"), 0))
def negative(): return build(loss=lambda o, b: (mse_loss(o, b["y"], reduction="sum"), -len(o)))
def negative_tensor(): return build(loss=lambda o, b: (mse_loss(o, b["y"], reduction="sum"), torch.tensor(-len(o))))
def infinite_weight(): return build(loss=lambda o, b: (mse_loss(o, b["y"], reduction="sum"), float("inf")))
def infinite_tensor(): return build(loss=lambda o, b: (mse_loss(o, b["y"], reduction="sum"), torch.ones(()) / 0))
def with_arguments(): return build(model=lambda width: Net(width))
def at_length(): return build(model=AtLength)
def gives_dict(): return build(model=Answers)
def gives_none(): return build(model=Forgets)
def merged_graphs(): return build(lambda x, y: (x, torch.arange(14).view(2, 7)))
def mean_alone(): return build(loss=lambda o, b: mse_loss(o, b["y"]))
def mean_of_all(): return build(loss=lambda o, b: (mse_loss(o, b["y"]), 1))
def number(): return build(loss=lambda o, b: (float(o.sum()), 1))
def vector(): return build(loss=lambda o, b: ((o - b["y"]) ** 2, len(o)))
def detached(): return build(loss=lambda o, b: (o.detach().sum(), len(o)))
def wrong_key(): return build(loss=lambda o, b: (mse_loss(o, b["target"]), 1))
def wrong_width(): return build(model=lambda: Net(9))
def one_sample(): return build(model=Normed, samples=1)
def empty(): return build(lambda x, y: (x[:0], y[:0]))
def uneven(): return build(lambda x, y: (x[:3], y))
def an_object(): return build(lambda x, y: (iter("abc"), y))
def huge(): return build(model=Huge)
def an_instance(): return build(model=Net())
def an_optimizer(): return build(optimizer=torch.optim.SGD(Net().parameters(), lr=0.1))
def no_parameters(): return build(model=Nothing)
def frozen(): return build(model=lambda: Net().requires_grad_(False))
def tokens(): return build(lambda x, y: (torch.full((16, 3), 7), y), model=Table)
def diverges(): return build(loss=lambda o, b: (1e38 * mse_loss(o, b["y"], reduction="sum") * 1e10, len(o)))
def no_inputs(): return Task(model=Net, loss=loss, batch=build().batch)
def pairs(): return Task(model=Net, loss=loss, batch=lambda step: (torch.ones(16, 8), torch.ones(16, 1)))
def no_data(): return Task(model=Net, loss=loss)
def misspelt(): return Task(modle=Net, loss=loss)
def random_batch(): return Task(model=Net, loss=loss, batch=lambda step: {"x": torch.rand(4, 8), "y": torch.ones(4)})
def needs(size): ...
def breaks(): raise ValueError("no data here")
def gives_nothing(): ...
def leaves(): raise SystemExit(3)
def bad_loss(): return Task(model=dict, loss=None, batch=lambda step: None)
def steps_fail(): return Task(model=Net, loss=loss, batch=lambda step: open("nowhere.npy"))


def bare_inputs(): return Task(model=Net, loss=loss, inputs=lambda b: b["x"], batch=build().batch)
def inputs_by_name(): return Task(model=Net, loss=loss, inputs=lambda b: {"x": b["x"]}, batch=build().batch)
def no_groups(): return build(optimizer=lambda: torch.optim.SGD(Net().parameters(), lr=0.1))
def others_parameters(): return build(optimizer=lambda groups: torch.optim.SGD(Net().parameters(), lr=0.1))
def no_step(): return Task(model=Net, loss=loss, batch=lambda: {"x": torch.ones(4, 8)})
def output_alone(): return build(loss=lambda output: (output.sum(), len(output)))
def four(): return build(loss=lambda o, b: (o.sum(), len(o), 3, 4))
def words(): return build(loss=lambda o, b: (o.sum(), "many"))
def a_loader(): return rows(torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=4))


def labels():
    def loss(output, batch):
        return cross_entropy(output.expand(-1, 3), torch.arange(len(output)), reduction="sum"), len(output)

    return build(loss=loss)


class Rows:
    def __init__(self, length=10, broken=False):
        self.length, self.broken = length, broken

    def __len__(self):
        return self.length

    def read(self, indices):
        if self.broken:
            raise KeyError("x.npy")
        x = torch.stack([torch.full((8,), float(i)) for i in indices])
        return {"x": x, "y": x[:, :1]}


def rows(data): return Task(model=Net, loss=loss, inputs=lambda b: ((b["x"],), {}), data=data)
def few_rows(): return rows(Rows())
def no_rows(): return rows(Rows(0))
def broken_rows(): return rows(Rows(broken=True))


def own_backward():
    def loss(output, batch):
        total = mse_loss(output, batch["y"], reduction="sum")
        total.backward()
        return total, len(output)

    return build(loss=loss)


def gives_pair(): return build(model=Pair)
def lazy(): return build(model=Lazy)
def reads_file(): return build(model=Reads)
def wrapped(): return build(model=lambda: nn.parallel.DistributedDataParallel(Net()))
def wrapped_dp(): return build(model=lambda: nn.DataParallel(Net()))
def bf16_batch(): return build(lambda x, y: (x.bfloat16(), y))
def numpy_batch(): return build(lambda x, y: (x.numpy(), y.numpy()))
def list_batch(): return build(lambda x, y: (x.tolist(), y.tolist()))
def dataset(): return rows(torch.utils.data.TensorDataset(torch.ones(8, 8), torch.ones(8, 1)))
def generator(): return rows(x for x in range(3))
def decayed(groups): return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(groups, lr=0.1), 2)
def a_scheduler(): return build(optimizer=decayed)
def lr_word(): return build(optimizer=lambda groups: torch.optim.SGD(groups, lr="0.1"))
def no_graph(): return build(loss=lambda o, b: (torch.tensor(mse_loss(o, b["y"]).item()), len(o)))
def yields(): yield build()


class Carries(Net):
    kept = None

    def forward(self, x):
        hidden = self.a(x)
        if self.kept is not None:
            hidden = hidden + self.kept
        self.kept = hidden
        return self.b(hidden)


@dataclass
class Result:
    logits: torch.Tensor


class Wraps(Net):
    def forward(self, x):
        return Result(super().forward(x))


class AtLength(Net):
    def forward(self, x):
        raise ValueError("many words " * 9_000)


class Leaves(Net):
    def forward(self, x):
        raise SystemExit(0)


def labelled(loss): return build(lambda x, y: (x, (x[:, 0] > 0).float()), model=lambda: Classes(), loss=loss)


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, x):
        return self.a(x)


def target_first(): return labelled(lambda o, b: (cross_entropy(b["y"].long(), o, reduction="sum"), len(o)))
def float_labels(): return labelled(lambda o, b: (cross_entropy(o, b["y"], reduction="sum"), len(o)))
def batch_first(): return build(loss=lambda batch, output: (mse_loss(output, batch["y"], reduction="sum"), len(output)))
def module_loss(): return build(loss=nn.MSELoss())
def complex_loss(): return build(loss=lambda o, b: (o.sum() * 1j, len(o)))
def carries(): return build(model=Carries)
def gives_result(): return build(model=Wraps)
def ends_the_program(): return build(model=Leaves)
def gives_class(): return build(model=lambda: Net)
def misspelt_optimizer(): return build(optimizer=lambda groups: torch.optim.Adamm(groups))
def a_batch(): return Task(model=Net, loss=loss, batch=torch.ones(4, 8))
def a_path(): return rows("data/train")
def no_held_out(): return few_rows().with_(eval_data=Rows(0))


def then(change):  # batches of which the second is another
    def batch(step):
        return build().batch(step) if step == 0 else change(build().batch(step))

    return Task(model=Net, loss=loss, inputs=lambda b: ((b["x"],), {}), batch=batch)


def other_fields(): return then(lambda b: {"x": b["x"], "target": b["y"]})
def other_width(): return then(lambda b: {"x": b["x"][:, 1:], "y": b["y"]})
def no_second(): return then(lambda b: [][1])


def optimizer_word(): return build(optimizer="adamw")
def batch_loader(): return Task(model=Net, loss=loss, batch=torch.utils.data.DataLoader([1]))
def loss_class(): return build(loss=nn.MSELoss)
def of_model(model): return torch.optim.SGD(model.parameters(), lr=0.1)
def optimizer_of_model(): return build(optimizer=of_model)
def scheduler(): return Task(model=Net, loss=loss, scheduler=3)
def compiled(): return build(model=lambda: torch.compile(Net()))
def jitted(): return build(model=lambda: torch.jit.script(Net()))
def graph_weight(): return build(loss=lambda o, b: (o.square().sum(), o.sigmoid().sum()))
def int_labels():
    return build(lambda x, y: (x, (x[:, 0] > 0).int()), model=lambda: Classes(), loss=class_loss)
def class_loss(output, batch): return cross_entropy(output, batch["y"], reduction="sum"), len(output)
def unset(): return build(model=Unset)


class Unset(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), float("nan")))

    def forward(self, x):
        return super().forward(x * self.scale)


def lambdas():
    return Task(
        model=lambda: torch.nn.Linear(2, 1),
        loss=lambda y, b: (y.sum(), len(y)),
        inputs=lambda b: ((b,), {}),
        batch=lambda step: torch.ones(4, 2),
    )
"""

FILES = {
    "mine.py": TASKS,
    "broken.py": "def task(:\n",
    "lacking.py": "import nowhere_to_be_found\n",
    "helpers.py": "def _hidden():\n    return 1\n",
    "bad.toml": "[train\n",
    "circle.toml": 'extends = "circle.toml"\n',
    "old.toml": '[task]\nname = "gone.py:task"\n',
    "other.yaml": "train:\n  steps: 3\n",
    "words.toml": '[train]\nsteps = "ten"\nseed = 1.5\n',
    "section.toml": "[training]\nsteps = 3\n",
    "marked.toml": "\ufeff[train]\nstepz = 3\n",
    "a_file": "",
    "old_runs/20260101-000000-mine/config.toml": '[task]\nname = "mine.py:good"\n',
    "old_runs/20260101-000000-mine/plan.toml": "",
    "listed.toml": "train = [1, 2]\n",
    "twice.toml": "[train]\nsteps = 3\nsteps = 4\n",
    "note.ipynb": '{"cells": [null]}',
    "versioned.toml": "version = 1\n",
    "typed.toml": 'dp_shard = "2"\nzero = true\n',
    "empty.py": "",
    "relative.py": "from .model import Net\n",
    "grouped.py": "import torch\ntorch.distributed.init_process_group('gloo', init_method='env://')\n",
    "elsewhere.py": "import os\nos.chdir('named')\n",
    "parses.py": "import argparse\np = argparse.ArgumentParser('own')\np.add_argument('F')\np.parse_args([])\n",
    "trains.py": "import shardwise\nfrom mine import good\nshardwise.train('trains.py:good', steps=2)\n",
    "proves.py": "import shardwise\nfrom mine import good\nshardwise.verify('proves.py:good', 'dp_replicate=2')\n",
    "named/json.py": "from mine import good\n",
    "named.py/inner.py": "from mine import good\n",
    "empty.json": "",
    "odd.json": '{"model_type": 3}',
    "folder.toml/inner.py": "",
    "empty.safetensors": "",
    "done/model.safetensors": "",
    "curly.toml": "[train]\nname = “mine”\n",
    "yaml.toml": "train:\n  steps: 3\n",
    "plan_below.toml": '[train]\nplan = "dp_shard=2"\n',
    "their_words.toml": "[train]\nnum_train_epochs = 3\n",
    "ds.json": '{"zero_optimization": {"stage": 3}}',
    "done_runs/one/checkpoints/step-00000002/manifest.json": "{}",
    "bare_run/config.toml": "[train]\nsteps = 1\n",
    "pointer/model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n",
}

H100 = ["--cluster", "1x8 h100-sxm-80gb", "--global-batch", "8", "--seq", "1k"]
SHAPE = ["llama3-8b", *H100]
ONE = ["--cluster", "1x8 h100-sxm-80gb"]

# what is wrong is seen without running a model
IN_WORDS = [
    # the command line
    (["trian"], 2, "Did you mean 'train'?"),
    (["help"], 2, "shardwise --help shows what it takes"),
    (["show"], 2, "say which: "),
    (["checkpoint"], 2, "say which: "),
    (["train", "--stepz", "2"], 2, "'--steps'"),
    (["train", "--steps", "0"], 2, "shardwise train --help shows what it takes"),
    (["train", "--steps", "ten"], 2, "'ten' is not a valid whole number"),
    (["train", "text", "--plan", "dp_shard=2", "zero=3"], 2, "as in dp_shard=2,zero=3"),
    (["verify", "text"], 2, "Missing option '--plan'"),
    (["verify", "text", "--plan", "dp_shard=2", "--bogus"], 2, "No such option"),
    (["verify", "text", "--plan", "dp_shard=2", "--set", "train.seed=1"], 2,
     "reads keys of [lora] for a task; others are CONFIG.toml's"),
    (["verify", "my.toml", "--shrink"], 2, "--shrink is for tasks"),
    (["verify", "nowhere.toml"], 2, "there is no such file"),
    (["compare", *SHAPE, "--plan", "dp_shard=8"], 2, "Did you mean one of: '--lora', '--plans'?"),
    (["train", "--lr", "3e-4"], 2, "give it as --set optimizer.lr=..."),
    (["train", "--dp-shard", "2"], 2, "give it as --plan dp_shard=..."),
    (["verify", "text", "--zero", "3"], 2, "give it as --plan zero=..."),
    (["train", "-plan", "dp_shard=2"], 2, "No such option '-p'; did you mean --plan?"),
    (["train", "–plan", "dp_shard=2"], 2, "'–' is not the keyboard's '-'"),
    (["train", "mine:good", "--nnodes", "2"], 2, "here the product of the plan's degrees; ranks are started by"),
    (["train", "mine:good", "--gradient-checkpointing"], 2, "give it as --plan remat=full or remat=selective"),
    (["verify", "mine:good", "--fsdp"], 2, "give it as --plan dp_shard=N,zero=3"),
    (["train", "--resume-from-checkpoint", "runs/one"], 2, "here --resume RUN"),
    (["train", "--deepspeed", "ds.json"], 2, "give it as --plan dp_shard=N,zero=1, 2 or 3"),
    (["train", "--plan", "docker=true"], 2, "unknown key; here start torchrun in each container"),
    (["train", "--plan", "lora=16"], 2, "unknown key; here [lora] of a configuration, --set lora.rank=16"),
    (["train", "--set", "train.lora=16"], 2, "here [lora] of a configuration"),
    (["train", "--learning-rate", "3e-4"], 2, "give it as --set optimizer.lr=..."),
    (["verify", "mine.py", "--lr", "3"], 2, "a script's own stand behind --, as -- --lr ..."),
    (["train", "--resume", "runs/one", "--init-from", "runs/one"], 2, "give one of them"),
    (["train", "\udcdcbung.py:task"], 2, "this shell's locale does not: export LC_ALL=C.UTF-8"),
    (["doctor", "--plan", "tp=2"], 2, "measured over a launcher's ranks, and there are none"),
    (["plan", "llama3-8b", *ONE, "--price", "$2"], 2, "'$2' is not a valid number"),
    # plans
    (["train", "--plan", "{'dp_shrad': 2}"], 2, "did you mean 'dp_shard'?"),
    (["verify", "text", "--plan", '{"dp_shard": "two"}'], 2, "dp_shard must be a whole number, got 'two'"),
    (["train", "--plan", "8"], 2, "of 8 ranks: dp_replicate=8 (replicas) or dp_shard=8,zero=3"),
    (["train", "--plan", "dp_shard＝2"], 2, "'＝' is not the keyboard's '='"),
    (["train", "--plan", "ds.json"], 2, "shardwise plan --from ds.json"),
    (["train", "--plan", "typed.toml"], 2, "plan.zero = true: expected 0, 1, 2 or 3"),
    (["train", "--plan", "versioned.toml"], 2, "plan.version = 1: unknown key (known: dp_replicate, "),
    (["train", "versioned.toml"], 2, "version = 1: unknown key (known: extends, plan, "),
    (["train", "--plan", "dp_shard=2 zero=3"], 2, "a comma is missing between its keys: write dp_shard=2,zero=3"),
    (["verify", "text", "--plan", "dp_shard=2 zero=3"], 2, "write dp_shard=2,zero=3"),
    (["verify", "text", "--plan", "dp_shard=2;zero=3"], 2, "write dp_shard=2,zero=3"),
    (["verify", "text", "--plan", "dp_shrad=2"], 2, "did you mean 'dp_shard'?"),
    (["train", "--set", "plan.dp_shrad=2"], 2, "did you mean 'dp_shard'?"),
    (["train", "--plan", ""], 2, "--plan is empty: give a plan, such as dp_shard=2,zero=3, or single"),
    (["simulate", *SHAPE, "--plan", " "], 2, "--plan is empty"),
    (["train", "--plan", "dp_shard=2,"], 2, "there is a comma too many in 'dp_shard=2,'"),
    (["train", "--plan", "tp=2,sp"], 2, "write sp=true"),
    (["train", "--plan", "dp_shard=2,zero3"], 2, "write zero=3"),
    (["verify", "text", "--plan", "tp"], 2, "give tp its value"),
    (["verify", "text", "--plan", "auto"], 2, "`shardwise plan TASK --cluster ...` proposes plans"),
    (["train", "--plan", "DP_SHARD=2"], 2, "did you mean 'dp_shard'?"),
    (["train", "--plan", "bf16"], 2, "write precision=bf16"),
    (["train", "--plan", "dp_shard=2,wrap="], 2, "give wrap its value"),
    (["train", "--plan", "precision=float16"], 2, "did you mean 'fp16'?"),
    (["train", "--plan", "schedule=1f1b"], 3, "give pp its degree"),
    (["train", "--plan", "microbatches=4"], 3, "accumulate cuts a batch without stages"),
    (["train", "--plan", "ep=2"], 3, "give dp_shard a multiple of ep"),
    (["train", "text", "extra"], 2, "Got unexpected extra argument (extra)"),
    (["train", "--plan", "single,precision=bf16"], 2, "single stands alone: leave it out"),
    (["train", "--plan", "ddp=2"], 2, "that is dp_replicate=2 here"),
    (["verify", "text", "--plan", "fsdp=2"], 2, "that is dp_shard=2,zero=3 here"),
    (["train", "--plan", "dp_shard=2.0"], 2, "expected a whole number of at least 1"),
    (["train", "--plan", "domain=2*3"], 2, "domain must be tiles per spatial dim such as 1x2"),
    (["train", "--plan", "dp_shard:2"], 2, "expected key=value, got 'dp_shard:2'"),
    (["train", "--plan", "dp_shard=two"], 2, "expected a whole number of at least 1"),
    (["train", "--plan", "dp_shard=2,dp_shard=4"], 2, "dp_shard is given twice"),
    (["train", "--plan", "dp_shard=2,zero=x"], 2, "expected 0, 1, 2 or 3"),
    (["train", "--plan", "zero=3"], 3, "give dp_shard its degree"),
    (["train", "--plan", "precision=bf17"], 2, "did you mean 'bf16'?"),
    (["train", "--plan", "pp=2,schedule=zbw"], 2, "did you mean 'zbv'?"),
    (["train", "--plan", "sp=yes"], 2, "expected true or false"),
    (["train", "--plan", "nowhere.toml"], 2, "there is no such file"),
    (["train", "--plan", "dp_shard=2", "--nproc", "3"], 2, "nproc is 3, but plan dp_shard=2,zero=3 needs 2"),
    (["train", "--nproc", "2"], 2, "change the plan, for example to dp_replicate=2"),
    (["train", "--resume", ""], 2, "--resume is empty: give it its value, or leave it out"),
    (["train", "--init-from", " "], 2, "--init-from is empty"),
    (["train", ""], 2, "it is empty: give text, digits, file.py:task or module:task"),
    (["train", "mine.py:"], 2, "say which task of mine.py: mine.py:build, mine.py:good"),
    (["train", "mine.py::good"], 2, "one colon stands before the task: mine.py:good"),
    # the configuration
    (["train", "curly.toml"], 2, "is not the keyboard's"),
    (["train", "yaml.toml"], 2, "it looks like YAML: a section is [train], a key steps = 3"),
    (["train", "plan_below.toml"], 2, "it stands below [train]: put it above the first section"),
    (["train", "their_words.toml"], 2, "train.num_train_epochs = 3: unknown key; that is train.epochs here"),
    (["train", "--set", "train.fsdp=2"], 2, "that is plan.dp_shard=N,zero=3 here"),
    (["train", "--set", "lora.r=8"], 2, "that is lora.rank here"),
    (["train", "--set", "train.what_is_it=8"], 2, "shardwise config --starter shows all keys"),
    (["train", "meta-llama/Llama-3.2-1B", "--data", "chat.jsonl"], 2, "nothing is fetched from a hub: hf download"),
    (["train", "mine.py:good", "--data", "chat.jsonl"], 2, "--data: task.files = "),
    (["train", "--set", f"train.name={'a' * 300}"], 2, "at most 100, for it becomes part of a folder's name"),
    (["train", "--init-from", "a", "--set", 'train.init_rename=["*.model="]'], 2, "any text is .*, a dot is "),
    (["train", "--set", "train.stepz=3"], 2, "did you mean 'train.steps'?"),
    (["train", "--set", "lr=3"], 2, "did you mean 'optimizer.lr'?"),
    (["train", "--set", "train.precision=bf16"], 2, "did you mean 'plan.precision'?"),
    (["train", "--set", "optimizer.lr"], 2, "expected key=value"),
    (["train", "--set", "optimizer.lr=-1"], 2, "expected a number greater than 0"),
    (["train", "--set", "optimizer.name=adamm"], 2, "did you mean 'adam'?"),
    (["train", "--profile-steps", "5"], 2, "expected first:last, such as 10:12"),
    (["train", "--steps", "2", "--set", "train.steps=3"], 2, "is given by --steps too"),
    (["train", "--plan", "dp_shard=3", "--set", "task.model.hidden=30"], 2, "a multiple of task.model.heads"),
    (["train", "nowhere.toml"], 2, "there is no such file"),
    (["train", "other.yaml"], 2, "a configuration is TOML: shardwise config --starter > my.toml"),
    (["train", "listed.toml"], 2, "train = [1, 2]: expected a table of keys and values"),
    (["train", "twice.toml"], 2, "Cannot overwrite a value"),
    (["train", "--set", "optimizer.lr=nan"], 2, "expected a finite number"),
    (["train", "--set", "train=3"], 2, "expected a table of keys and values"),
    (["train", "--set", "optimizer.betas=0.9"], 2, "expected two numbers"),
    (["train", "--set", "train.steps=3", "--set", "train.steps=4"], 2, "train.steps is set twice"),
    (["train", "--set", "train.device=cuda:0"], 2, "expected auto, cpu or a type such as cuda"),
    (["train", "--set", "train.steps="], 2, "expected key=value, such as optimizer.lr=3e-4"),
    (["train", "--set", "schedule.name=cosin"], 2, "did you mean 'cosine'?"),
    (["train", "--set", "optimizer.lr=0,001"], 2, "expected a number"),
    (["train", "--set", "data.path=here"], 2, "known: extends, plan, schedule, task, lora, optimizer, train"),
    (["train", "words.toml"], 2, 'train.seed = 1.5: expected a whole number'),
    (["train", "section.toml"], 2, "did you mean 'train'?"),
    (["train", "marked.toml"], 2, "did you mean 'train.steps'?"),
    (["train", "--steps", "3", "--set", "train.epochs=2"], 2, "give one of them"),
    (["train", "--set", "train.randomness=none"], 2, "expected 'global' or 'fast'"),
    (["train", "bad.toml"], 2, "is not TOML"),
    (["config", "nowhere.toml"], 2, "there is no such file"),
    (["config", "circle.toml"], 2, "extends goes in a circle"),
    (["config", "--starter", "--set", "a=b"], 2, "--starter takes no file"),
    (["config", "--set", "train.steps=[1"], 2, "is not a TOML value"),
    # tasks by name
    (["train", "."], 2, "it is a folder: give a file in it with its task, as file.py:task"),
    (["train", "mine.good"], 2, "a colon stands before the task: mine.py:good"),
    (["train", "mine/good"], 2, "a colon stands before the task: mine.py:good"),
    (["train", "note.ipynb"], 2, "jupyter nbconvert --to script note.ipynb"),
    (["train", "tex"], 2, "did you mean 'text'?"),
    (["train", "mine.py"], 2, "mine.py:good, mine.py:blocks"),
    (["verify", "mine", "--plan", "dp_shard=2"], 2, "say which task of mine.py: mine.py:build, mine.py:good"),
    (["plan", "mine.py", "--cluster", "1x8 h100-sxm-80gb"], 2, "say which task of mine.py"),
    (["train", "helpers.py"], 2, "has no function that takes nothing and returns a Task"),
    (["train", "mone:task"], 2, "there is no module 'mone'; did you mean 'mine'?"),
    (["train", "mone.py:task"], 2, "; did you mean 'mine.py'?"),
    (["train", "nothing_alike.py:task"], 2, "there is no file nothing_alike.py in /"),
    (["train", "old_runs/20260101-000000-mine"], 2, "--resume old_runs/20260101-000000-mine goes on with it"),
    (["verify", "old_runs/20260101-000000-mine"], 2, "old_runs/20260101-000000-mine/config.toml is its configuration"),
    (["train", "--set", "train.out=old_runs"], 2, "old_runs has runs of mine: give the task"),
    (["train", "--resume", "auto", "--set", "train.out=old_runs"], 2, "`text` where the built-in example is meant"),
    (["train", "old.toml"], 2, "there is no file gone.py, here or beside old.toml"),
    (["train", "mine:break"], 2, "did you mean 'breaks'?"),
    (["train", "mine:NOT_A_TASK"], 2, "is of type int; expected a Task"),
    (["train", "mine:needs"], 2, "takes size"),
    (["train", "mine:gives_nothing"], 2, "returned NoneType"),
    (["verify", "nowhere:task", "--plan", "dp_shard=2"], 2, "there is no module 'nowhere'"),
    # forecasts
    (["plan", *SHAPE[1:]], 2, "Missing argument 'TASK'"),
    (["plan", "llama3-9b", *H100], 2, "did you mean 'llama-3-8b'?"),
    (["plan", "llama3-8b", "--cluster", "1x8"], 2, 'a cluster is written as "16x8 h100-sxm-80gb, ib-400"'),
    (["plan", "llama3-8b", "--cluster", "1x8 h100-sxm"], 2, "did you mean 'h100-sxm-80gb'?"),
    (["plan", "llama3-8b", "--cluster", "1x8 h100-sxm-80gb"], 2, "give --seq and --global-batch"),
    (["plan", *SHAPE, "--fix", "tpp=2"], 2, "did you mean 'tp'?"),
    (["plan", *SHAPE, "--fix", "tp=8", "--fix", "dp_shard=8"], 2, "64 devices, more than the 8 of the cluster"),
    (["plan", *SHAPE, "--fix", "tp=8", "--max-tp", "4"], 2, "contradicts --max-tp 4: leave one of them out"),
    (["plan", *SHAPE, "--fix", "zero=3,dp_shard=1"], 2, "together: leave one of them out"),
    (["plan", *SHAPE, "-o", "nowhere/best.toml"], 2, "there is no folder"),
    (["plan", "llama3-405b", *H100, "--fix", "offload=none"], 2, "Use more devices, or a smaller batch or sequence"),
    (["simulate", *SHAPE, "--plan", "tp=8", "--randomness", "fast"], 2, "without dropout: leave it out"),
    (["plan", "llama3-8b", *ONE, "--seq", "8kk", "--global-batch", "8"], 2, "such as 512, 8k or 16M, got '8kk'"),
    (["plan", "llama3-8b", *ONE, "--seq", "8k", "--global-batch", "-4"], 2, "a number of samples such as 512"),
    (["plan", "llama3-8b", *ONE, "--seq", "8k", "--global-batch", "4M"], 2, "write 4M-tokens where tokens are meant"),
    (["plan", "llama3-8b", *ONE, "--seq", "8k", "--global-batch", "0"], 2, "expected a whole number of at least 1"),
    (["plan", "llama3-8b", "--cluster", "0x8 h100-sxm-80gb"], 2, "counts must be at least 1"),
    (["plan", "llama3-8b", "--cluster", "bad.toml"], 2, "bad.toml is not TOML"),
    (["plan", *SHAPE, "--precision", "int8"], 2, "is not one of fp32, fp64, bf16"),
    (["plan", *SHAPE, "--top", "0"], 2, "0 is not in the range"),
    (["plan", "llama3-8b", "--cluster", "folder.toml"], 2, "cannot be read: Is a directory; give a .toml file"),
    (["plan", "llama3-8b", "--cluster", "gone.toml"], 2, "`shardwise probe -o gone.toml` measures this machine"),
    (["plan", "odd.json", *H100], 2, "but Transformers does not recognize this architecture"),
    (["compare", *SHAPE, "--plans", "dp_shard=8;dp_shrad=8"], 2, "did you mean 'dp_shard'?"),
    (["show", "ring", "all_reduce", "--ranks", "1"], 2, "1 is not in the range"),
    (["plan", "llama3-8b", "--cluster", "8xh100"], 2, "or the path of a .toml file"),
    (["simulate", *SHAPE, "--plan", "dp_shard=16"], 2, "needs 16 devices"),
    (["compare", *SHAPE, "--plans", " "], 2, "write them as"),
    (["compare", *SHAPE, "--plans", "dp_shard=8", "--measure"], 2, "give module:name"),
    (["probe", "-o", "nowhere/cluster.toml"], 2, "there is no folder"),
    (["show", "schedule", "dp_shard=2"], 3, "pp is 1"),
    (["show", "schedule", "1f1b"], 2, "write schedule=1f1b"),
    (["show", "schedule", "pp=4,microbatches=6,schedule=interleaved1f1b"], 3, "microbatches=6 is not a multiple of it"),
    (["show", "schedule", "pp=9999,microbatches=9999"], 2, "give fewer stages or micro-batches"),
    (["show", "schedule", ""], 2, "PLAN is empty: give a plan"),
    (["show", "ranks", "dp_shard=999999"], 2, "give smaller degrees of the outer axes"),
    (["show", "schedule", "pp=4,schedule=zbb"], 2, "did you mean 'zbv'?"),
    (["show", "ring", "all_reduce", "--ranks", "100000"], 2, "100000 is not in the range"),
    (["simulate", "other.yaml", *ONE, "--plan", "single"], 2, "a configuration is TOML"),
    (["plan", "empty.json", *ONE], 2, "empty.json is not JSON"),
    (["show", "ring", "allreduce"], 2, "did you mean 'all_reduce'?"),
    (["report", "nowhere"], 2, "there is no folder nowhere"),
    (["report", "mine.py"], 2, "mine.py is a file; give the run's folder"),
    (["checkpoint", "export", "nowhere"], 2, "say which: shardwise checkpoint convert"),
    (["report", "."], 2, "it has no metrics.jsonl; give a folder below runs/"),
    (["run", "mone.py"], 2, "did you mean 'mine.py'?"),
    (["run", "--plan", "tp=2", "mine.py"], 2, "the plan stands in the script: prepare(..., plan=...)"),
    (["run", "--verbose", "mine.py"], 2, "there is no option --verbose"),
    (["run", "named.py"], 2, "named.py is a folder: give a file in it, as named.py/train.py"),
    (["run", "python", "mine.py"], 2, "leave python out: run starts Python itself, as shardwise run mine.py"),
    (["run", "broken.py"], 2, "broken.py:1: SyntaxError: "),
    (["run", "note.ipynb"], 2, "jupyter nbconvert --to script note.ipynb"),
    (["checkpoint", "inspect", "a_file"], 2, "it is no checkpoint, and holds none"),
    # what is on the disk
    (["show", "schedule", "pp=2", "-o", "mine.py"], 2, "mine.py exists, and shardwise did not write it"),
    (["plan", "mine:good", *ONE, "-o", "listed.toml"], 2, "give another name, or move it away"),
    (["launch", "digits", "--plan", "dp_shard=8", "--on", "slurm", "--extra", "--mem=0\nrm x"], 2, "give one (--setup"),
    (["plan", "meta-llama/Meta-Llama-3-8B", *H100], 2, "did you mean 'llama-3-8b'?; nothing is fetched from a hub"),
    (["compare", *SHAPE, "--plans", "dp_shard=8,tp=8"], 2, 'between plans stands ";", as in "dp_shard=8;tp=8"'),
    (["checkpoint", "convert", "done", "out.pt"], 2, "give out.safetensors, or a folder, out"),
    (["checkpoint", "convert", "bare_run", "out", "--merge"], 2, "bare_run has no adapters of [lora]"),
    (["checkpoint", "inspect", "done_runs"], 2, "holds none; give the folder of a run"),
    (["checkpoint", "convert", "pointer", "out"], 2, "a pointer of git lfs, not the weights themselves: git lfs pull"),
    (["train", "mine:good", "--resume", "latest"], 2, "auto goes on with this task's last run"),
    (["train", "mine:good", "--profile-steps", "12:10"], 2, "ends before it begins"),
    (["train", "mine:good", "--resume", "nowhere"], 2, "there is no such folder"),
    (["train", "mine:good", "--init-from", "nowhere"], 2, "there is no such file or folder"),
    (["train", "mine:good", "--resume", "done"], 2, "with its weights by --init-from done, and let it save by "),
    (["train", "mine:good", "--resume", "named"], 2, "holds a checkpoint: give a run's folder, or new"),
    (["train", "mine:good", "--init-from", "named"], 2, ": give a .safetensors file, or a run's folder"),
    (["train", "mine:good", "--init-from", "empty.safetensors"], 2, "fetch it again"),
    (["train", "mine:good", "--init-from", "mine.py"], 2, "give a .safetensors file, or a run's folder"),
    (["checkpoint", "inspect", "nowhere"], 2, "there is no such file or folder"),
    (["checkpoint", "verify", "."], 2, "it is no checkpoint, and holds none"),
]  # fmt: skip

# what is wrong is seen where the task is built, or its first step taken
IN_TASKS = [
    (["train", "broken:task"], 2, "broken.py:1: SyntaxError"),
    (["train", "lacking:task"], 2, "lacking.py:1: ModuleNotFoundError"),
    (["train", "mine:breaks"], 2, "ValueError: no data here"),
    (["train", "mine:leaves"], 2, "SystemExit: 3"),
    (["train", "mine:bad_loss"], 2, "Task.loss must be callable"),
    (["train", "mine:misspelt"], 2, "did you mean 'model'?"),
    (["train", "mine:no_data"], 2, "give `batch` (step -> global batch) or `data` (a Source)"),
    (["train", "mine:steps_fail"], 2, "the task's batch(0) failed: "),
    (["train", "mine:an_instance"], 2, "(model=Net, not model=Net())"),
    (["train", "mine:an_optimizer"], 2, "got SGD: give optimizer=lambda groups: SGD(groups, ...)"),
    (["train", "mine:float64"], 2, "give batch['x'].to(torch.float32) where the batch is made"),
    (["verify", "mine:half", "--plan", "dp_replicate=2"], 2, "give batch['x'].to(torch.float32)"),
    (["train", "mine:integers"], 2, "batch['x'] is int64 where the model's weights are float32"),
    (["verify", "mine:integers", "--plan", "dp_replicate=2"], 2, "give batch['x'].to(torch.float32)"),
    (["train", "mine:nan"], 1, "batch['x'] holds NaN in sample 5 of that step's batch"),
    (["train", "mine:infinite"], 1, "batch['y'] holds an infinite value in sample 3"),
    (["verify", "mine:infinite", "--plan", "dp_replicate=2"], 2, "batch['y'] holds an infinite value in sample 3"),
    (["train", "mine:diverges"], 1, "Lower the learning rate"),
    (["train", "mine:no_weight"], 1, "every target is ignored, or a mask is empty"),
    (["verify", "mine:no_weight", "--plan", "dp_replicate=2"], 2, "every target is ignored or a mask is empty"),
    (["train", "mine:negative"], 2, "-5 as the weight, which divides the sum and turns its sign around"),
    (["train", "mine:negative_tensor"], 2, "return how many samples or tokens count, 0 or more"),
    (["verify", "mine:negative_tensor", "--plan", "dp_replicate=2"], 2, "-16 as the weight, which divides the sum"),
    (["train", "mine:infinite_weight"], 2, "the weight is inf: return how many samples or tokens count, 0 or more"),
    (["train", "mine:infinite_tensor"], 1, "loss nan is not finite in step 1"),
    (["train", "mine:with_arguments"], 2, "Task.model is called with nothing: give a function that builds it"),
    (["train", "mine:at_length"], 2, " many ... "),
    (["train", "mine:gives_dict"], 2, "The model returned a dict of 'logits': take from it in Task.loss"),
    (["verify", "mine:gives_dict", "--plan", "dp_replicate=2"], 2, "as output['logits']"),
    (["train", "mine:gives_none"], 2, "The model returned None: let its forward end in `return`"),
    (["train", "mine:merged_graphs"], 2, "padded to one size, as nodes (B, N, features) and edges (B, E, 2)"),
    (["train", "mine:mean_alone"], 2, "Task.loss must return (sum, weight)"),
    (["verify", "mine:mean_of_all", "--plan", "dp_replicate=2"], 3, "Return (sum, weight), not a mean"),
    (["train", "mine:number"], 2, "the sum must be a tensor with one element, got float"),
    (["train", "mine:vector"], 2, "the sum must be a tensor with one element, got Tensor of shape (5, 1)"),
    (["train", "mine:detached"], 2, "does not depend on any trainable parameter"),
    (["train", "mine:wrong_key"], 2, "KeyError: 'target'"),
    (["train", "mine:wrong_width"], 2, "mat1 and mat2 shapes cannot be multiplied (5x8 and 9x8)"),
    (["train", "mine:labels"], 2, "give the head one output for each class"),
    (["train", "mine:tokens"], 2, "is beyond the table 'table' of 4 rows"),
    (["train", "mine:no_inputs"], 2, "give Task.inputs (batch -> args, kwargs)"),
    (["train", "mine:pairs"], 2, "give Task.inputs (batch -> args, kwargs)"),
    (["verify", "mine:pairs", "--plan", "dp_replicate=2"], 2, "give Task.inputs (batch -> args, kwargs)"),
    (["simulate", "mine:pairs", *ONE, "--plan", "dp_replicate=2"], 2, "give Task.inputs (batch -> args, kwargs)"),
    (["plan", "mine:pairs", *ONE], 2, "give Task.inputs (batch -> args, kwargs)"),
    (["train", "mine:random_batch"], 2, "draw from torch.Generator().manual_seed(step)"),
    (["train", "mine:one_sample"], 2, "make the batch larger"),
    (["train", "mine:empty"], 2, "its tensors have 0 samples"),
    (["train", "mine:uneven"], 2, "batch['x'] has 3 samples but batch['y'] has 16"),
    (["train", "mine:an_object"], 2, "give the batch as dicts, lists or tuples of tensors"),
    (["train", "mine:no_rows"], 2, "look at the folder, pattern or filter that it reads by"),
    (["verify", "mine:no_rows", "--plan", "dp_replicate=2"], 2, "Task.data is empty: Rows has no samples"),
    (["plan", "mine:no_rows", *ONE], 2, "Task.data is empty: Rows has no samples"),
    (["verify", "mine:detached", "--plan", "dp_replicate=2"], 2, "without .item(), .detach()"),
    (["verify", "mine:huge", "--plan", "dp_replicate=2"], 2, "`shardwise plan` says where this one fits"),
    (["train", "mine:broken_rows"], 2, "KeyError: 'x.npy'"),
    (["train", "mine:huge"], 2, "parameters are 670.6 GiB of weights"),
    (["train", "mine:no_parameters"], 2, "there is nothing to train"),
    (["train", "mine:frozen"], 2, "there is nothing to train"),
    (["verify", "mine:good", "--plan", "dp_shard=32"], 2, "use fewer data ranks or larger batches"),
    (["train", "--plan", "tp=10000000"], 2, "or take a smaller plan here"),
    (["verify", "mine:good", "--plan", "pp=8"], 3, "8 stages need 7 places to cut the forward"),
    (["verify", "mine:blocks", "--plan", "dp_shard=2,wrap=Block"], 2, "did you mean 'Blocks'?"),
    (["verify", "mine:blocks", "--plan", "dp_shard=2,wrap=Blocks"], 2, "such as wrap=Sequential"),
    (["train", "mine:lambdas", "--set", "train.batch_samples=3"], 2, "would have no effect on this task"),
    (["train", "mine:lambdas", "--set", "train.epochs=3"], 2, "it has no end"),
    (["train", "mine:lambdas", "--set", "train.eval_every=3"], 2, "has no `eval_data`"),
    (["train", "mine:good", "--set", "train.device=cuda"], 2, 'use "auto" or "cpu"'),
    (["train", "mine:good", "--set", "train.out=a_file"], 2, "is not a folder: give one with --set train.out=FOLDER"),
    (["train", "mine:good", "--set", "train.out=/proc/none"], 2, "with --set train.out=FOLDER"),
    (["train", "--plan", "accumulate=5", "--set", "train.batch_samples=4"], 2, "cannot be split into accumulate=5"),
    (["train", "--steps", "2", "--set", "schedule.warmup_steps=2"], 2, "does not end within"),
    (["train", "mine:bare_inputs"], 2, "as (args, kwargs), got Tensor: such as lambda batch:"),
    (["verify", "mine:inputs_by_name", "--plan", "dp_replicate=2"], 2, "as (args, kwargs), got dict"),
    (["simulate", "mine:inputs_by_name", *ONE, "--plan", "dp_replicate=2"], 2, "as (args, kwargs), got dict"),
    (["train", "mine:no_groups"], 2, "Task.optimizer is called with (groups of parameters)"),
    (["train", "mine:others_parameters"], 2, "build it over its argument, the groups"),
    (["train", "mine:no_step"], 2, "Task.batch is called with (step): too many positional arguments"),
    (["train", "mine:output_alone"], 2, "Task.loss is called with (output, batch)"),
    (["train", "mine:four"], 2, "(sum, weight, {name: extra}), got tuple of length 4"),
    (["train", "mine:words"], 2, "the weight must be one number, got str"),
    (["train", "mine:a_loader"], 2, "give its dataset (loader.dataset)"),
    (["show", "tp", "mine:good", "--plan", "dp_shard=2"], 2, "give tp its degree"),
    (["verify", ":good", "--plan", "dp_shard=2"], 2, "there is no file before the colon: give file.py:good"),
    (["verify", "./mine:good", "--plan", "dp_shard=2"], 2, "the path of a file ends in .py: ./mine.py:good"),
    (["verify", "a_file:good", "--plan", "dp_shard=2"], 2, "the file a_file does not end in .py"),
    (["verify", "note.ipynb:task", "--plan", "dp_shard=2"], 2, "jupyter nbconvert --to script note.ipynb"),
    (["train", "mine:Net"], 2, "write a function that returns Task(model=Net, ...)"),
    (["train", "mine:yields"], 2, "returned generator, not a shardwise.Task"),
    (["train", "mine:own_backward"], 2, "Task.loss calls backward itself"),
    (["verify", "mine:own_backward", "--plan", "dp_replicate=2"], 2, "return the sum alone"),
    (["train", "mine:no_graph"], 2, "without .item(), .detach() or torch.no_grad()"),
    (["train", "mine:gives_pair"], 2, "take the tensor from it in Task.loss, as output[0]"),
    (["train", "mine:lazy"], 3, "give the layer the size of its input"),
    (["train", "mine:reads_file"], 2, "No such file or directory: 'weights.pt'"),
    (["train", "mine:wrapped"], 2, "Give the plain module: the plan spreads it"),
    (["train", "mine:wrapped_dp"], 2, "Give the plain module: the plan spreads it"),
    (["train", "mine:bf16_batch"], 2, "give batch['x'].to(torch.float32) where the batch is made"),
    (["train", "mine:numpy_batch"], 2, "give torch.from_numpy(batch['x']) where the batch is made"),
    (["train", "mine:list_batch"], 2, "give tensors, as torch.tensor(...)"),
    (["train", "mine:dataset"], 2, "The batch is a list of 2: take from it by place, as batch[0]"),
    (["train", "mine:generator"], 2, "only a map-style dataset, with __len__ and __getitem__"),
    (["train", "mine:a_scheduler"], 2, "must return a torch.optim.Optimizer, got StepLR"),
    (["train", "mine:target_first"], 2, "with the arguments of cross_entropy exchanged: the output, then the target"),
    (["plan", "mine:target_first", *ONE], 2, "with the arguments of cross_entropy exchanged"),
    (["train", "mine:batch_first"], 2, "with the arguments of Task.loss exchanged: it is called with (output, batch)"),
    (["train", "mine:float_labels"], 2, "batch['y'] is float32: give batch['y'].long() where the batch is made"),
    (["train", "mine:module_loss"], 2, "a function that takes the target from the batch and returns (sum, weight)"),
    (["train", "mine:complex_loss"], 2, "take its .real or .abs()"),
    (["train", "mine:carries", "--steps", "2"], 2, "detach() what is kept, and return the sum alone"),
    (["train", "mine:gives_result"], 2, "take the tensor from it in Task.loss, as output.logits"),
    (["train", "mine:ends_the_program"], 1, "SystemExit: 0"),
    (["train", "mine:gives_class"], 2, "got the class Net: call it, Net()"),
    (["train", "mine:misspelt_optimizer"], 2, "did you mean 'Adam'?"),
    (["plan", "mine:misspelt_optimizer", *ONE], 2, "did you mean 'Adam'?"),
    (["train", "mine:a_batch"], 2, "Task.batch must be callable, got Tensor"),
    (["train", "mine:a_path"], 2, "it is a path; give an object that reads it by index"),
    (["train", "mine:no_held_out"], 2, "look at the folder, pattern or filter that it reads by, or leave it out"),
    (["train", "mine:other_fields", "--steps", "2"], 2, "batch['target'] was absent, now float32 (B, 1)"),
    (["verify", "mine:other_fields", "--plan", "dp_replicate=2"], 2, "batch['y'] was float32 (B, 1), now absent"),
    (["train", "mine:other_width", "--steps", "2"], 2, "batch['x'] was float32 (B, 8), now float32 (B, 7)"),
    (["train", "mine:no_second", "--steps", "2"], 2, "the task's batch(1) failed: "),
    (["plan", "mine:numpy_batch", *ONE], 2, "give torch.from_numpy(batch['x']) where the batch is made"),
    (["train", "named.py:task"], 2, "named.py is a folder: give a file in it, as named.py/file.py:task"),
    (["train", "named/json.py:good"], 2, "give the file another name"),
    (["train", "--resume"], 2, "requires an argument; --help shows what it takes"),
    (["train", "empty.py:task"], 2, "empty has no 'task'"),
    (["train", "mine:lr_word"], 2, "; lr is the text '0.1': give a number"),
    (["train", "mine:optimizer_word"], 2, "give optimizer=lambda groups: torch.optim.AdamW(groups, ...)"),
    (["train", "mine:batch_loader"], 2, "give the loader's samples instead, data=loader.dataset"),
    (["train", "mine:loss_class"], 2, "Task.loss is the class MSELoss, of which an instance takes two tensors"),
    (["train", "mine:optimizer_of_model"], 2, "called with named groups of parameters, not with the model"),
    (["train", "mine:scheduler"], 2, "the configuration sets it, not the task: --set schedule.name=..."),
    (["train", "mine:compiled"], 2, "what torch.compile made. Give the plain module"),
    (["train", "mine:jitted"], 2, "what torch.jit made. Give the plain module"),
    (["train", "mine:graph_weight"], 2, "give weight.detach() where it counts samples"),
    (["verify", "mine:graph_weight", "--plan", "dp_replicate=2"], 2, "the weight carries a gradient"),
    (["train", "mine:int_labels"], 2, "batch['y'] is int32: give batch['y'].long() where the batch is made"),
    (["train", "mine:unset"], 1, "'scale' holds NaN or an infinite value at start. Give it values"),
    (["train", "text", "--set", "task.model.hidden=1000000000000", "--steps", "2"], 2, "make the sizes of the model"),
    (["train", "relative.py:task"], 2, "name a file of a package as package.module:task"),
    (["train", "grouped.py:task"], 2, "leave init_process_group out"),
    (["train", "parses.py:task"], 2, "parses.py:4 ended itself as it was imported, with exit code 2"),
    (["train", "trains.py:good"], 2, "its file calls train as it is imported, as every rank does: put that under `if"),
    (["verify", "proves.py:good", "--plan", "dp_replicate=2"], 2, "its file calls verify as it is imported"),
    (["train", "elsewhere.py:task"], 2, "leave it out and give paths by Path(__file__).parent"),
    (["verify", "mine:blocks", "--plan", "dp_shard=2,wrap=LlamaDecoderLayer"], 2, "its blocks are blocks.0"),
    (["verify", "mine:blocks", "--plan", "pp=2,stages=layers.3"], 2, "stages may begin at blocks"),
    (["verify", "mine:good", "--plan", "domain=2"], 3, "(dp_shard deals samples): no tensor has 1 dim(s) of space"),
    (["train", "mine:few_rows", "--set", "train.workers=200000"], 2, "of memory are enough for "),
]  # fmt: skip
