"""docs/modules.md: which unusual modules run under which plan, each cell proven in float64 or refused with its reason.

python benchmarks/unusual.py --write                        # every module of tests/tasks/unusual_tasks.py, some minutes
python benchmarks/unusual.py --only gru,capsules --write    # these rows alone, in the page as it is
python benchmarks/unusual.py --again --write                # the cells that are not equal, again
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "tasks"))

import unusual_tasks  # noqa: E402
from cells import Found, cell, rows, share, written  # noqa: E402

from shardwise.ranks import RankPool  # noqa: E402

PLANS = ["dp_replicate=2", "dp_shard=2,zero=3", "tp=2", "pp=2", "tp=2,pp=2", "cp=2", "domain=2"]
PAGE = ROOT / "docs" / "modules.md"
NO_SPACE = "–"
TABLE = "## Every module under every plan"


def cells_of(name: str) -> list[str]:
    """The plans that a module is run under: tiles where its samples have dims of space."""
    return [plan for plan in PLANS if plan != "domain=2" or name in unusual_tasks.SPACE]


def as_page(found: Found) -> str:
    """Markdown: what to know by kind of module, what each module is, the table, the reasons."""
    names = list(unusual_tasks.ALL)
    none = {(name, plan): (NO_SPACE, "") for name in names for plan in PLANS if plan not in cells_of(name)}
    lines, reasons = rows({**found, **none}, names, PLANS)
    described = [f"| {name.replace('_', ' ')} | {unusual_tasks.ALL[name].__doc__} |" for name in names]
    return "\n".join([
        "# Recurrent and other unusual modules", "",
        "Written by `python benchmarks/unusual.py --write` from proofs that it runs: two steps in float64 against one "
        f"process. {share(found, names, PLANS)} cells are equal to one process; the others are refused before the "
        "first step (or in it, where ranks are seen to take different branches) with the reason below the table. "
        f"{_wrong(found)}The modules are written as for one process, without a word on ranks: "
        "`tests/tasks/unusual_tasks.py`.", "",
        "## What to know, by kind of module", "",
        "| your module | what runs, and what to watch |",
        "|---|---|",
        *KINDS, "",
        "## The modules", "",
        "| module | what is in it |", "|---|---|", *described, "",
        TABLE, "",
        f"{NO_SPACE}: the samples have no dims of space.", "",
        *lines, "",
        *(["Reasons:", "", *reasons, ""] if reasons else []),
    ])  # fmt: skip


def _wrong(found: Found) -> str:
    """A sentence on cells where a plan runs and differs; nothing where there are none."""
    wrong = [f"{name.replace('_', ' ')} under `{plan}`" for (name, plan), (what, _) in found.items() if what == "WRONG"]
    told = "WRONG is a plan that runs and differs, which `verify` tells with exit code 1: "
    return f"{told}{', '.join(wrong)}. " if wrong else ""


KINDS = [
    "| recurrent: `nn.LSTM`, `nn.GRU`, a loop over time of your own | all of these plans. `tp` cuts the layers around "
    "the recurrence and leaves its own weights whole (`shardwise show tp` says why for each): it saves memory in "
    "embeddings and heads; where there is nothing else, it keeps them in shares and gathers them to read. The `cp` of "
    "a recurrence is right, and no faster: each position needs the one before |",
    "| packed sequences | dropout between the layers of a packed LSTM is one process's: drawn by the sequence and "
    "time of each row. On rows that no module was called with (`packed._replace(data=drop(packed.data))`) it is "
    "refused: drop before packing, or in a module that takes the packed sequence. Where batches have unlike lengths, "
    "stages of `pp` tell each other the shapes of every micro-batch. Under `cp` what is packed is gathered, and "
    "every rank computes the recurrence; `Task(sequence=...)` names the dims, since lengths fit the whole sentence "
    "alone. Forecasts take the lengths of the task's first sample, and say so |",
    "| graphs, trees, sets | samples first: a batch is (B, nodes, features) and (B, edges, 2), and the forward may "
    "make one large graph of it (`index_add` with offsets): `edges + N * arange(B)`, flattened. Graphs of unlike "
    "sizes are padded to N nodes and E edges: one node more than any graph has, edges that pad going from it to "
    "itself, and a mask of the real nodes (B, N) for what is summed. A batch that is one merged graph (edges 2 x E) "
    "has no dim of samples to deal, and is refused as such; dense adjacencies (B, N, N) need no edges |",
    "| weights made by a net, `functional_call`, `vmap` | a unit of `zero=3` whose weight is used outside its "
    "module's forward is [gathered with what lies around it](techniques/zero3.md#weights-read-outside-their-unit). "
    "Weights of the outermost module are cut into stages between functions of torch that its forward calls; one "
    "`vmap` over all layers is one function |",
    "| parametrizations, spectral norm | all, the buffers that move in every forward included |",
    "| a choice for each sample | declare `Task(branches=\"per_sample\")`. Where a rank may call other modules than "
    "its neighbours, `zero=3` and pipelines are refused: use replicas or `zero=2` |",
    "| a choice for the whole batch by its values | the steps of an adaptive solver follow from the largest error of "
    "the batch, and a rank has a part of it: results would differ by as much as the solver's tolerance lets them. "
    "Where a forward reads values in Python, its samples are run together and each alone in float64 before the "
    "first step, and such a choice is refused. `tp`, which leaves the batch whole, is equal. Steps of fixed size, and "
    "choices for each sample, are equal everywhere |",
    "| weights that the forward sets (`weight.data *= mask`, rows brought back to one length, a copy that follows) | "
    "what depends on weights alone: all. Under `zero=3` such weights are "
    "[whole on every rank](techniques/zero3.md#weights-that-the-forward-writes), and one stage of a pipeline has all "
    "that uses one. What depends on samples (scales taken from the first batch) is refused on data ranks |",
    "| weights that the forward replaces (`self.codes.weight = nn.Parameter(...)`) | held as buffers, which they are "
    "in one process too: no optimizer moves what it does not hold. Refused where the replacement unties them from "
    "another module |",
    "| averages over the batch that are kept (codebooks that move, running means of inputs), queues of earlier "
    "batches, ghost batches | each data rank would keep its own: refused there, until "
    "`Task(loss_scope=\"model\")` says that every data rank is to [run the model on all "
    "samples](techniques/accumulation.md#losses-that-do-not-add-up). Equal under `tp` and pipelines |",
    "| states, counters and tables kept from batch to batch in plain attributes | all, also beside accumulation; "
    "stages of `pp` keep what [their own part made](techniques/pipeline.md), and schedules with several stages on a "
    "rank are refused. What mixes samples is seen by a second forward in a row |",
    "| an energy whose gradient is in the loss (`torch.autograd.grad` in the forward) | replicas, `zero`, `tp`, "
    "and `pp`, whose stages [each take their part of it](techniques/pipeline.md) and keep `zero` below 3; "
    "under `zero=3` all weights are one unit, gathered from the forward until the backward, and a gradient that the "
    "*loss* takes to be differentiated is refused |",
    "| collectives in the forward (mixtures and codebooks that are written for data ranks) | run as they are under "
    "data ranks; refused with the line of the call under plans in which ranks run parts of the forward or of the same "
    "samples (`tp`, `pp`, `ep`, `cp`, `domain`) |",
    "| operations that refuse NaN, such as `cholesky` | all; a pipeline stage runs the outermost forward on NaN for "
    "what it was not sent, and makes up the results of those that fail on it. Checks in Python (a distribution's of "
    "its arguments) are choices by values: no stage begins after one in the same forward |",
    "| fields | `domain` cuts them into tiles; reading at computed places (`grid_sample`) or writing into a part of a "
    "spectrum is refused there |",
]  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="names of modules, with commas between")
    parser.add_argument("--again", action="store_true", help="the cells of the page that are not equal, or not there")
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    options = parser.parse_args()
    before = written(PAGE.read_text(encoding="utf-8").split(TABLE)[1]) if PAGE.exists() else {}
    names = options.only.split(",") if options.only else list(unusual_tasks.ALL)
    wanted = [(name, plan) for name in names for plan in cells_of(name)]
    if options.again:
        wanted = [each for each in wanted if before.get(each, ("",))[0] != "equal"]
    kept = {each: what for each, what in before.items() if each[0] in unusual_tasks.ALL and what[0] != NO_SPACE}
    found: Found = kept if options.only or options.again else {}
    with RankPool(quiet=True) as pool:
        for place, (name, plan) in enumerate(wanted):
            found[name, plan] = cell(f"unusual_tasks:{name}", plan, pool)
            told = f"{place + 1}/{len(wanted)} {name} {plan}: {' '.join(found[name, plan])[:200]}"
            print(told, file=sys.stderr, flush=True)
            if options.write:  # as it comes, so that what is done by any time is kept
                PAGE.write_text(as_page(found), encoding="utf-8")
    if not options.write:
        print(as_page(found))
    sys.exit(any(what in ("WRONG", "FAILS") for what, _ in found.values()))


if __name__ == "__main__":
    main()
