"""Bugs on both sides of a proof, room by room: of what one process and ranks share, and of what ranks run alone."""

from __future__ import annotations

from mutations.bugs import HERE, M, bug

RUN, NARROW = "mutations/run.toml", "mutations/narrow.toml"
BLEND, LORA, WSD, EXPERTS, NOISY = (f"mutations/{name}.toml" for name in ("blend", "lora", "wsd", "experts", "noisy"))
U, D = "unusual_tasks:", "domain_tasks:"
TWO, MICRO = "dp_replicate=2", "dp_replicate=2,accumulate=2"

SHARED = [
    bug("normal numbers lie about a tenth", "random.variates:normal", "radius * torch.cos(",
        "0.1 + radius * torch.cos(", U + "variational", TWO),
    bug("two draws of a module are one", "random.modes:_Paths.draw", "torch.default_generator.manual_seed(mix(key))",
        "torch.default_generator.manual_seed(key)", U + "diffusion", TWO),
    bug("elements of a row are dropped together", "random.hashing:below_at", "+ columns * _G)", "+ columns * 0)",
        M + "decoder_dropout", TWO),
    bug("numbers of a row are alike", "random.hashing:bits_at", "+ columns * _G)", "+ columns * 0)", U + "variational",
        TWO),
    bug("weights of one shape begin alike", "trace.deferred:Built._assign_seeds",
        'seed_of("init", self.seed, name, place)', 'seed_of("init", self.seed, "", place)', M + "mlp", TWO),
    bug("drawn weights begin with the width of a unit", "trace.deferred:Built._value",
        "self._replay(self._refs[name])", "self._replay(self._refs[name]) * 1.5", M + "mlp", TWO),
    bug("casts are done as they are written", "trace.double:KeepDouble.__torch_dispatch__",
        "if _is_double(args, wide):", "if False:", M + "hf_llama", "tp=2"),
    bug("a roll-out reads the first step's targets", "rollouts:_Steps.at", "batch[self.targets].select(1, k)}",
        "batch[self.targets].select(1, 0)}", "test_rollout:k4", TWO),
    bug("a roll-out does not go on from its result", "rollouts:Rollout.forward",
        "state = steps.advance(outputs[-1], now)", "pass", "test_rollout:k4", TWO),
    bug("a blend's rows come back in the order of its sources", "data.blend:_joined", "torch.cat(tensors)[back]",
        "torch.cat(tensors)", BLEND, TWO),
    bug("a blend's second block begins anew", "data.blend:BlendOrder._own", "int(block) * np.asarray(counts)",
        "0 * np.asarray(counts)", BLEND, TWO),
    bug("sources of a blend have one order", "data.blend:BlendOrder._samples", "self.names[index]", "self.names[0]",
        BLEND, TWO),
    bug("an adapter's alpha is its rank", "adapters.lora:peft_config",
        "section.alpha if section.alpha is not None else section.rank", "section.rank", LORA, TWO),
    bug("an adapter has no dropout", "adapters.lora:peft_config", "lora_dropout=section.dropout", "lora_dropout=0.0",
        LORA, TWO),
    bug("every read draws the first one's noise", "random.reading_seeds:ReadDraws.sample",
        'seed_of("sample", self._seed, self._epoch, index)', 'seed_of("sample", self._seed, 0, 0)', NOISY, TWO),
    bug("noise is that of the first epoch", "random.reading_seeds:ReadDraws.sample",
        'seed_of("sample", self._seed, self._epoch, index)', 'seed_of("sample", self._seed, 0, index)', NOISY, TWO),
]  # fmt: skip

STEP = [
    bug("samples of the first rank alone are counted", "step.control:PendingRow.answer",
        "sum(row[2] for row in rows)", "rows[0][2]", RUN, TWO),
    bug("samples of the last micro-batch alone are counted", "step.control:Tally.add", "self.samples += count",
        "self.samples = count", RUN, MICRO),
    bug("an evaluation trains", "step.train_step:evaluate", "set_training(state.module, False)",
        "set_training(state.module, True)", RUN, TWO),
    bug("gradients are clipped where they are short", "step.normalise:clip_of", "min(1.0, state.clip_norm",
        "max(1.0, state.clip_norm", RUN, TWO),
    bug("the loss leaves extra terms out", "step.normalise:normalise",
        "(agreed.total + sum(agreed.extras.values())) / weight", "agreed.total / weight", M + "moe", TWO),
    bug("an extra term of its own weight is halved", "step.objective:_extra_factors", "main / t, t)",
        "main / t / 2, t)", M + "moe", TWO),
    bug("a batch crosses the end of an epoch", "data.steps:Steps.span", "min(position + self.batch_size, end)",
        "position + self.batch_size", RUN, TWO),
    bug("held-out samples are the last of each stretch", "training.held_out:Spread.read", "index)[0] for",
        "index)[1] - 1 for", RUN, TWO),
    bug("decay begins a step late", "training.learning_rates:wsd", "(total - decay) + 1", "(total - decay)", WSD, TWO),
    bug("an order's rounds change places", "data.order:_feistel", "index % 2 == 0", "index % 2 == 1", RUN, TWO),
    bug("averages lag behind by a step", "training.loop:_Rank._step", "self.ema.update()",
        "self.ema.update() if step else None", RUN, TWO),
]  # fmt: skip

FILES = [
    bug("halves of cut weights are labelled as each other's", "checkpoint.holdings:share_of",
        "cut.owners.indices(axis.index)", "cut.owners.indices(axis.size - 1 - axis.index)", RUN, "tp=2"),
    bug("experts are labelled as the other rank's", "checkpoint.holdings:share_of",
        "*engine.state.experts.span(name, rows)",
        "*(rows - bound for bound in reversed(engine.state.experts.span(name, rows)))", EXPERTS,
        "dp_shard=2,ep=2,zero=2"),
    bug("a flat piece is labelled from the start", "checkpoint.holdings:trained_piece",
        "start, start + view.numel())", "0, view.numel())", RUN, "dp_shard=2,zero=2"),
]  # fmt: skip

RANKS = [
    bug("statistics of ranks forget how far their means lie apart", "parallel.batchnorm:_Over.of",
        "(var + (mean - common).square()) * own", "var * own", M + "unet_batchnorm", TWO),
    bug("no gradient comes through the statistics", "parallel.batchnorm:_Normalised.backward", "dx = dx - shift",
        "pass", M + "unet_batchnorm", TWO),
    bug("a gradient of a stage's input is the last one alone", "parallel.pipeline.backward:of_input",
        "leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient", "leaf.grad = gradient * 0.5",
        M + "decoder", "pp=2,microbatches=2,schedule=zbh1"),
    bug("rows come back from experts in the order of experts", "parallel.expert.exchange:through_owners",
        "back[order.argsort()]", "back", M + "moe", "dp_shard=2,ep=2"),
    bug("a block that runs again meets today's state", "memory.recompute:_again",
        "with before.standing_in(), passed.standing_in(), weights.standing_in():", "with weights.standing_in():",
        M + "unet_batchnorm", "dp_replicate=2,remat=full"),
    bug("gradients of chunks are the last one's", "memory.chunk_runs:_Gradient._take", "self.total.add_(mine)",
        "mine.to(wide)", M + "decoder", "dp_replicate=2,position_chunks=2"),
    bug("a sub-group's options stay those of the one before", "tiers.state_tiers:only", "if id(param) in chosen]",
        "if id(param) in chosen][:1]", M + "decoder", "dp_replicate=2,offload=optimizer:disk"),
    bug("state that comes in a step is doubled", "tiers.state_tiers:StateTiers._leave", "here.copy_(tensor.detach())",
        "here.copy_(tensor.detach() * 2)", M + "decoder", "dp_replicate=2,offload=optimizer:disk"),
    bug("a field's halo is a row off", "part.tiles.overlap:sides", "(low, high), (start, count) = plan.wanted[rank][0]",
        "(low, high), (start, count) = (plan.wanted[rank][0][0] + 1, plan.wanted[rank][0][1])", D + "unet_group",
        "domain=2"),
    bug("a border of three ranks is sent twice", "parallel.replicate:Replicate._reduce",
        "assert bucket.buffer is not None", "bucket.buffer.mul_(1 + (self.axis.size == 3))", HERE + "momentum", TWO),
]  # fmt: skip

EDGES = [  # what a proof reaches only where it goes there on purpose
    bug("rank 1 reads its tile a row early", "part.positions:Positions.region", "(start, start + count)",
        "(start - (axis is not None and axis.index == 1), start + count - (axis is not None and axis.index == 1))",
        f"{RUN} task.name=run_tasks:tiled", "domain=2"),
    bug("a mirrored border repeats its last cell", "boundary:Edges.padded", "mode=_MODES[kind])",
        'mode="replicate" if kind == "reflect" else _MODES[kind])', "boundary_tasks:box", TWO),
    bug("masks of randomness=fast are those of the first step", "step.seeded_draws:seed_masks",
        'seed_of("fast", state.seed, state.steps_done, *place)', 'seed_of("fast", state.seed, 0, *place)',
        f"{RUN} train.randomness=fast", TWO),
    bug("a large piece of a checkpoint lacks its writers' last element", "checkpoint.save:assigned",
        "count * (place + 1) // len(ranks)", "count * (place + 1) // len(ranks) - (place > 0)", RUN, TWO),
]  # fmt: skip

ROOMS = SHARED + STEP + FILES + RANKS + EDGES
