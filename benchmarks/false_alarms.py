"""How often the engine as it is, which is right, is called NOT EQUAL: tasks and runs x plans of 2 to 8 ranks x seeds.

python benchmarks/false_alarms.py                  # goes on where it stopped; proofs in build/false_alarms.jsonl
python benchmarks/false_alarms.py --seconds 60     # for so long
python benchmarks/false_alarms.py --count          # what was found, and run nothing
python benchmarks/false_alarms.py --thorough       # 60 of the tasks, each by `--thorough`, in three precisions in turn

A run (fp32, bf16, fp16) is proven twice: in float64 against a plain loop, and in its own precision.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("", "tasks")]

from shardwise.config import Given, load  # noqa: E402
from shardwise.proof.outcome import Parity  # noqa: E402
from shardwise.proof.parity import verify  # noqa: E402
from shardwise.proof.verify_run import verify_run  # noqa: E402
from shardwise.ranks import RankPool  # noqa: E402

M, U, T = "shardwise.models.tasks:", "unusual_tasks:", "module_tasks:"
TASKS = [
    M + "decoder", M + "decoder_dropout", M + "moe", M + "vit", M + "unet_batchnorm", M + "unet_group", M + "mlp",
    U + "lstm", U + "graph_attention", U + "point_net", U + "diffusion", U + "glow", U + "temporal_fusion",
    U + "variational", T + "instance_norm_statistics", T + "norm_cumulative",
]  # fmt: skip
PLANS = [
    "dp_replicate=2", "dp_shard=3,zero=3", "dp_shard=4,zero=2", "dp_replicate=2,dp_shard=3,zero=1", "dp_replicate=7",
    "dp_replicate=5,accumulate=2", "tp=2", "pp=2,microbatches=2", "dp_shard=2,zero=3,tp=2", "dp_replicate=2,pp=2,tp=2",
    "dp_replicate=4,tp=2",
]  # fmt: skip
RUNS = {
    "mutations/run.toml": ["fp32"], "mutations/tokens.toml": ["fp32", "bf16"],
    "mutations/narrow.toml": ["fp32", "bf16", "fp16"],  # a CPU runs one in 16 bits
}  # fmt: skip
RUN_PLANS = ["dp_replicate=2", "dp_shard=3,zero=3", "dp_shard=2,zero=2", "dp_replicate=2,dp_shard=2,zero=3", "tp=2"]
SEEDS = range(3)
THOROUGH = 60
Case = tuple[str, str, int]  # task or configuration, plan, seed


def cases() -> list[Case]:
    """All of them, in an order drawn by a seed, so that what is done by any time is a fair sample."""
    found: list[Case] = [(task, plan, seed) for task in TASKS for plan in PLANS for seed in SEEDS]
    found += [(run, f"{plan},precision={precision}", seed) for run in RUNS for plan in RUN_PLANS
              for precision in RUNS[run] for seed in SEEDS]  # fmt: skip
    random.Random(0).shuffle(found)
    return found


def thorough_cases() -> list[Case]:
    """The first of the tasks, whose dtypes are proven in three precisions in turn."""
    tasks = [case for case in cases() if not case[0].endswith(".toml")][:THOROUGH]
    precisions = itertools.cycle(["fp32", "bf16", "fp16"])
    return [(task, f"{plan},precision={next(precisions)}", seed) for task, plan, seed in tasks]


def proof(case: Case, pool: RankPool, *, thorough: bool = False) -> Parity:
    """The proof of one case."""
    what, plan, seed = case
    if not what.endswith(".toml"):
        return verify(what, plan, seed=seed, thorough=thorough, pool=pool, timeout_s=120)
    values = [Given("plan", plan, "here"), Given("train.seed", seed, "here")]
    return verify_run(load(ROOT / "tests" / what, values=values), pool=pool, timeout_s=120)


def outcome(case: Case, pool: RankPool, *, thorough: bool = False) -> tuple[str, str]:
    """equal, refused, unproven, NOT EQUAL or failed; and why."""
    try:
        parity = proof(case, pool, thorough=thorough)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if parity.refused:
        return "refused", parity.refused
    if parity.parity:
        return "equal", ""
    return "NOT EQUAL" if "NOT EQUAL" in parity.text() else "unproven", parity.text()


def read(path: Path) -> dict[Case, dict]:
    """Finished cases."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["what"], row["plan"], row["seed"]): row for row in rows}


def counted(found: dict[Case, dict]) -> str:
    """One line for each kind of proof, and every false alarm in full."""
    kinds: dict[str, Counter[str]] = {}
    for (what, plan, _), row in found.items():
        kind = plan.rpartition("precision=")[2] if what.endswith(".toml") else "steps in float64"
        kinds.setdefault(kind, Counter())[row["outcome"]] += 1
    lines = [f"{kind}: {sum(counts.values())} proofs, " + ", ".join(f"{n} {name}" for name, n in counts.most_common())
             for kind, counts in kinds.items()]  # fmt: skip
    bad = [f"{case}: {row['outcome']}: {row['reason']}" for case, row in found.items()
           if row["outcome"] not in ("equal", "refused")]  # fmt: skip
    return "\n".join([*lines, *bad])


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=Path, help="finished cases; by default build/false_alarms.jsonl")
    parser.add_argument("--thorough", action="store_true", help="some tasks, each by a thorough proof")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--count", action="store_true", help="tell what was found, and run nothing")
    options = parser.parse_args()
    name = "false_alarms_thorough.jsonl" if options.thorough else "false_alarms.jsonl"
    path = options.cases or ROOT / "build" / name
    found, until = read(path), time.monotonic() + options.seconds
    if not options.count:
        path.parent.mkdir(parents=True, exist_ok=True)
        with RankPool(quiet=True) as pool, path.open("a", encoding="utf-8") as file:
            for case in thorough_cases() if options.thorough else cases():
                if case in found or time.monotonic() > until:
                    continue
                what, why = outcome(case, pool, thorough=options.thorough)
                row = {"what": case[0], "plan": case[1], "seed": case[2], "outcome": what, "reason": why[:1500]}
                found[case] = row
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(*case, what, why[:160].replace("\n", " "), flush=True)
    print(counted(found))
    sys.exit(any(row["outcome"] in ("NOT EQUAL", "failed") for row in found.values()))


if __name__ == "__main__":
    main()
