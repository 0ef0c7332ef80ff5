"""Modules that nobody prepared: each equals one process under its plans, or is refused with the mechanism's name."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise import verify
from shardwise.ranks import RankPool

SHORT = {
    "REPLICAS": "dp_replicate=2", "FLAT": "dp_shard=3,zero=2,accumulate=2", "FULL": "dp_shard=2,zero=3,accumulate=2",
    "ZERO3": "dp_shard=2,zero=3", "HYBRID": "dp_replicate=2,dp_shard=2,zero=3", "REMAT": "dp_replicate=2,remat=full",
}  # fmt: skip
# a file of tasks -> a module in each line, its plans, and behind a bar those under which it is proven in `long` alone
EQUAL = {
    "module_tasks": """
        two_draws                      REPLICAS FULL
        instance_norm_statistics       | FLAT
        layer_drop                     FULL | FLAT
        layer_drop_python              FLAT | FULL
        categorical                    REPLICAS | FLAT
        time_first                     REPLICAS | FLAT
        time_before_samples            REPLICAS
        random_loss                    FULL | REPLICAS
        norm_without_statistics        FULL | REPLICAS
        norm_cumulative                REMAT | FLAT
        norm_in_checkpoint             FULL | REPLICAS
        norm_functional                REMAT | FLAT
        counting                       REMAT | FULL REPLICAS
        spectral                       FULL | REMAT
        spectral_by_hooks              REMAT | FLAT
        weight_normed                  FULL | REMAT
        teacher                        FULL tp=2 | REPLICAS FLAT tp=2,pp=2
        odd_parameters                 FULL | REPLICAS FLAT HYBRID
        sparse_gradients               FULL | REPLICAS
        weight_used_outside            FULL pp=2,dp_shard=2,zero=3,microbatches=2 | FLAT HYBRID FULL,remat=full
        table_for_eval                 ZERO3
        weight_used_outside_of_one_module FULL
        weight_of_a_block_in_the_output FULL
        two_names                      FULL
        reentrant_twice                REPLICAS | FLAT
        tied_reentrant                 FLAT | REPLICAS
        routed_experts                 REPLICAS FULL | FLAT HYBRID
        penalised                      tp=2 | FULL REPLICAS
        hooked                         FULL tp=2,pp=2 | REPLICAS
        reversible                     FULL
        sparse_graph                   pp=2
        scripted                       tp=2,pp=2
        distributions                  FULL pp=2,tp=2
        writes_into_products           dp_replicate=2,remat=selective tp=2
        assigns_data                   tp=2
        shared_module                  FULL
        adds_to_views                  ZERO3,remat=full | FULL
        complex_parameter              FULL
        pairs                          FULL | REPLICAS HYBRID
        drops_a_single_sample          REPLICAS
        pairs_with_as_many_scales      FULL | REPLICAS FLAT
    """,
    # which a plan has to look at twice, and ways to make weights
    "unlike_tasks": """
        final_state                    pp=2 ZERO3
        final_state_gru                pp=2,microbatches=3 tp=2
        states_go_on                   pp=2
        unreached                      pp=2 | pp=2,schedule=zbh1,microbatches=3 dp_replicate=2,pp=2
        mapped                         pp=2 ZERO3 | dp_shard=2,zero=2,accumulate=2
        jacobian                       pp=2 ZERO3 | REPLICAS
        jacobian_inside                pp=2 ZERO3
        sensitivity                    pp=2 ZERO3
        rounded_inside                 tp=2 | ZERO3 pp=2
        loaded                         pp=2
        loaded_from_file               REPLICAS | tp=2,pp=2
        copied                         ZERO3
        own_generator                  pp=2 | ZERO3
        complex_weights                dp_shard=3,zero=1 | dp_replicate=3 dp_shard=2,zero=2,accumulate=2
        complex_signs                  ZERO3 | dp_shard=2,zero=2,accumulate=2
        weight_norm_hooks              pp=2
        weight_normed                  tp=2
        spectral                       pp=2
        orthogonal                     pp=2
        gathers_when_built             REPLICAS
        gathers_in_forward             ZERO3
        into_its_input                 ZERO3
        remembering                    tp=2,pp=2
        keeping                        tp=2,pp=2
    """,
    # which write into weights, or share statistics between calls
    "written_tasks": """
        powers                         pp=2,schedule=gpipe,microbatches=3 ZERO3 | pp=2 tp=2,pp=2 dp_shard=2,zero=2
        followed                       pp=2 | dp_shard=2,zero=1,pp=2 ZERO3 dp_shard=2,zero=3,pp=2
        twice                          pp=2
        slopes                         REPLICAS | tp=2 ZERO3
        averages                       REPLICAS | ZERO3 tp=2,pp=2 pp=2,dp_shard=2,zero=2
        set_from_outside               pp=2
        in_groups                      pp=2
        listed                         REPLICAS | ZERO3 tp=2
        after_use                      REMAT | dp_shard=2,zero=2,remat=selective REPLICAS
        before_use                     | REMAT dp_shard=2,zero=1,remat=selective
        switched                       dp_shard=2,zero=3,wrap=maker|critic
        normalised                     | pp=2 pp=2,schedule=zbh1,microbatches=3 ZERO3
        bounded                        | pp=2 dp_shard=2,zero=1 dp_shard=2,zero=2,tp=2
        scaled                         | pp=2 HYBRID
        twice_by_hooks                 | pp=2 pp=2,accumulate=2
        blocks                         | REMAT pp=2,remat=selective,schedule=gpipe
        blocks_by_matrices             | dp_shard=2,zero=3,remat=full dp_shard=2,zero=2
        stops                          | pp=2
    """,
    # which take gradients themselves
    "taken_tasks": """
        residual                       pp=2 | pp=4,microbatches=2 tp=2,pp=2 pp=2,schedule=zbh1,microbatches=3
        potential                      pp=2 | pp=3 dp_shard=2,zero=2,pp=2 tp=2,pp=2 pp=2,remat=full,accumulate=2
        potential_again                | pp=2,schedule=gpipe
        potential_unused               | pp=2
        packed                         pp=2 | tp=2,pp=2
        tangents                       pp=2 | tp=2,pp=2
        squeezed                       REPLICAS | pp=2
        table                          tp=2
        hamiltonian                    | dp_replicate=2,pp=2,microbatches=2
        descent                        | pp=2 pp=2,stages=energy.2 pp=3 dp_shard=2,zero=3,pp=2
        by_jacobian                    | pp=2,stages=energy.2
        by_weights                     | pp=2
        hessians                       | REPLICAS pp=2
        implicit                       pp=2,stages=norm | pp=4,microbatches=2 tp=2,pp=2
    """,
    "complex_tasks": """
        fno1d                          ZERO3 | tp=2,dp_shard=2,zero=1 cp=2
        fno2d                          tp=2 | domain=2
        fno3d                          | tp=2 domain=1x2,dp_shard=2,zero=3 dp_shard=3,zero=3
        state_spaces                   tp=2,dp_shard=2,zero=3 | pp=2 cp=2
        complex_net                    dp_shard=3,zero=1 tp=2,pp=2 | HYBRID,accumulate=2 tp=2,dp_shard=2,zero=2
        complex_net                    | dp_shard=2,zero=3,deterministic=4
        complex_experts                dp_shard=2,ep=2,zero=1 | dp_shard=2,ep=2,zero=3 tp=2,dp_shard=2,ep=2,zero=2
    """,
    # which keep something for the next forward, or make something of all samples together
    "remembering_tasks": """
        updated                        pp=2,microbatches=2 | pp=2,schedule=zbh1,microbatches=4
        counted                        pp=2,microbatches=2 | pp=4
        outside                        tp=2 | REPLICAS ZERO3 pp=2,microbatches=2
        stored                         pp=2,microbatches=2 | ZERO3 tp=2 dp_replicate=2,accumulate=2
        telling                        pp=2
        dropped                        pp=2,microbatches=2 | pp=4,microbatches=4 pp=2,schedule=interleaved1f1b
        dropped                        | dp_shard=2,zero=3,pp=2 ZERO3,remat=full
        dropped_by_torch               pp=2,microbatches=2 | pp=4,microbatches=4 dp_shard=2,zero=3,pp=2
        objects                        pp=2,stages=layers.3
        either_object                  pp=2,stages=head
        ghost_on_all                   ZERO3 | dp_replicate=3,accumulate=2 dp_shard=2,zero=2,pp=2 dp_shard=2,zero=1,tp=2
        ghost                          | tp=2,pp=2
        listed                         | pp=2,microbatches=2 pp=2 pp=3,microbatches=4 tp=2,pp=2 pp=2,schedule=gpipe
        listed                         | dp_replicate=2,pp=2 pp=2,remat=full
        first                          | pp=2,microbatches=2
        turns                          | pp=2,microbatches=2 pp=2,schedule=interleaved1f1b
        written                        | pp=2,microbatches=2 tp=2
        tables                         | pp=2,microbatches=2
        averaged                       | pp=2,microbatches=2
        averaged_on_all                | ZERO3
        own_generators                 | pp=2,microbatches=2 REPLICAS tp=2
        freezes                        | ZERO3 tp=2
    """,
}
OPTIONS: dict[str, dict[str, Any]] = {"remembering_tasks": {"steps": 3}}
CHANGING = ("written_tasks", "taken_tasks")  # whose every gradient differs by rounding, or nothing was computed

REFUSED = [
    ("module_tasks:masked_rows", "REPLICAS", "random op aten.bernoulli_"),
    ("module_tasks:last_sample_first", "REPLICAS", "masks dealt by global index"),
    ("module_tasks:gradient_hook", "REPLICAS", "puts a hook on the gradient of parameter 'weight'"),
    ("module_tasks:shared_memory", "REPLICAS", "'part' shares memory with 'whole'"),
    ("module_tasks:kept_views", "REPLICAS", "'parts' keeps a view of the parameter 'weight'"),
    ("module_tasks:sparse_adam", "REPLICAS", "as every plan makes them, dense and"),
    ("module_tasks:tied_reentrant", "pp=2,schedule=zbh1", "use a schedule that does not split"),
    ("module_tasks:reentrant_twice", "FULL", "more than once under a reentrant checkpoint"),
    ("module_tasks:pairs_of_logits", "REPLICAS", "compute what compares samples"),
    ("unlike_tasks:sparse_parameter", "REPLICAS", "'weight' is a tensor of layout torch.sparse_coo"),
    ("unlike_tasks:sparse_parameter", "pp=2", "'weight' is a tensor of layout torch.sparse_coo"),
    ("unlike_tasks:complex_weights", "dp_replicate=2,precision=bf16", "'weights.0' is complex, and precision=bf16"),
    ("unlike_tasks:gathers_when_built", "tp=2", "the forward issues a collective itself (all_gather at"),
    ("unlike_tasks:gathers_in_forward", "pp=2", "the forward issues a collective itself (all_reduce at"),
    ("unlike_tasks:gathers_when_built", "tp=2,pp=2", "unlike_tasks.py"),
    *(("unlike_tasks:fails_beside_others", plan, "though one process runs on them")
      for plan in ("tp=2", "pp=2", "REPLICAS")),
    ("written_tasks:twice", "pp=2,stages=tower.0",
     "the forward writes into 'tower.1.running_ ... belongs into one stage"),
    ("written_tasks:normalised", "dp_shard=2,zero=2,deterministic=4",
     "deterministic: the forward changes parameter '0.weight'"),
    ("written_tasks:untied", "REPLICAS",
     "the forward replaces parameter 'weight' of a Embedding by another nn.Parameter ... unties"),
    ("remembering_tasks:last", "pp=2",
     "in 'last', is in the way: what one forward leaves there, a later one reads on the other side"),
    ("remembering_tasks:ghost", "REPLICAS",
     'a module that mixes samples other than by batch norm declares loss_scope="model"'),
    ("remembering_tasks:ghost_on_all", "dp_shard=2,zero=3,deterministic=4",
     'loss_scope="model" has every data rank run'),
    ("remembering_tasks:averaged", "REPLICAS", "the forward leaves 'mean' for the next one, computed of all"),
    ("remembering_tasks:listed", "pp=2,schedule=interleaved1f1b",
     "the forward changes 'memory' for the next one to find"),
    ("remembering_tasks:counted", "pp=2,schedule=interleaved1f1b", "use schedule=1f1b"),
    ("remembering_tasks:freezes", "pp=2", "the forward turns requires_grad of weights within a step"),
    # one process sees that there is one sample less, and on a rank there are as many as before
    ("remembering_tasks:reset", "REPLICAS",
     "after one of 5 samples comes one of 4: rank 0 of 2 has as many as before"),
]  # fmt: skip
REFUSED_LONG = [
    ("taken_tasks:by_backward", "pp=2", "by other means than torch.autograd.grad"),
    ("taken_tasks:potential", "pp=2,schedule=zbv", "use schedule=1f1b"),
    ("taken_tasks:hamiltonian", "dp_shard=2,zero=3,pp=2", "use zero=2"),
]


def spelled(plan: str) -> str:
    """The plan with its first words in full."""
    first, *rest = plan.split(",")
    return ",".join([SHORT.get(first, first), *rest])


def rows() -> list[Any]:
    """(task, plan) of every row of the table, those behind a bar marked."""
    found = []
    for file, table in EQUAL.items():
        for line in table.strip().splitlines():
            name, *plans = line.split()
            bar = plans.index("|") if "|" in plans else len(plans)
            for place, plan in enumerate(plans):
                if plan != "|":
                    marks = [pytest.mark.long] * (place > bar)
                    found.append(pytest.param(f"{file}:{name}", spelled(plan), marks=marks))
    return found


@pytest.mark.parametrize(("task", "plan"), rows())
def test_module_equals_one_process(task: str, plan: str, pool: RankPool) -> None:
    file = task.partition(":")[0]
    parity = verify(task, plan, pool=pool, timeout_s=180, **OPTIONS.get(file, {}))
    assert parity.parity, parity.text()
    assert file not in CHANGING or (parity.gradient_error and parity.parameter_error)


@pytest.mark.parametrize(
    ("task", "plan", "reason"), [*REFUSED, *(pytest.param(*row, marks=pytest.mark.long) for row in REFUSED_LONG)]
)
def test_module_is_refused_by_its_mechanism(task: str, plan: str, reason: str, pool: RankPool) -> None:
    parity = verify(task, spelled(plan), pool=pool, timeout_s=60)
    assert parity.refused, parity.text()
    assert all(part in parity.refused for part in reason.split(" ... ")), parity.refused
