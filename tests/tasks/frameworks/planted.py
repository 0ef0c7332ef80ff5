"""Mistakes planted in the scripts beside this file: the text that is replaced, once, and the first number that differs.

Two ranks of the mistaken script are held against one process: of the script itself where that has the right answer
(`own`), else of the script before the mistake (`original`, `--against`). Two ranks have half the batch each.
"""

from __future__ import annotations

# name -> script, old text, new text, what is wrong
MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "no_set_epoch": (
        "ddp_gpt.py",
        "        sampler.set_epoch(epoch)\n",
        "",
        "every epoch has the order of the first",
    ),
    "padded_by_the_sampler": (
        "ddp_images.py",
        "Stripes(38, train=True)",
        "Stripes(37, train=True)",
        "DistributedSampler repeats a sample to make the ranks' shares equal",
    ),
    "batch_norm_apart": (
        "ddp_images.py",
        "convnet(JoinedBatchNorm2d)",
        "convnet(nn.BatchNorm2d)",
        "each rank norms by the statistics of its own batch",
    ),
    "statistics_without_gradient": (
        "ddp_images.py",
        "sums = all_reduce(torch.cat([x.sum((0, 2, 3)), x.square().sum((0, 2, 3)), count]))",
        "sums = all_reduce(torch.cat([x.sum((0, 2, 3)), x.square().sum((0, 2, 3)), count]).detach())",
        "the joined statistics have no gradient",
    ),
    "running_mean_of_a_rank": (
        "ddp_images.py",
        "self.running_mean.lerp_(mean, self.momentum)",
        "self.running_mean.lerp_(x.mean((0, 2, 3)), self.momentum)",
        "the running mean follows the rank's own batch",
    ),
    "sum_for_mean": (
        "ddp_images.py",
        "nn.CrossEntropyLoss(label_smoothing=0.1)",
        'nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")',
        "DDP takes the mean over ranks of what are sums over samples",
    ),
    "draws_of_a_rank": (
        "ddp_images.py",
        "torch.rand((), generator=g) < 0.5",
        "torch.rand(()) < 0.5",
        "ranks draw the same flips for different pictures",
    ),
    "mean_of_means": (
        "ddp_unet.py",
        "loss = squares.sum() * world / count ",
        "loss = squares.mean() ",
        "a rank with fewer samples in the last batch counts as much as one with more",
    ),
    "rate_times_world": (
        "ddp_unet.py",
        "torch.optim.Adam(ddp.parameters(), lr=5e-3)",
        "torch.optim.Adam(ddp.parameters(), lr=5e-3 * world)",
        "the learning rate grows with the ranks",
    ),
    "rate_of_a_rank": (
        "ddp_unet.py",
        "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)",
        "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + loss.item()) if epoch else 1.0)",
        "each rank sets the rate by its own loss, and the weights part",
    ),
    "module_called": (
        "ddp_lstm.py",
        "logits, state = model(x, state)",
        'logits, state = getattr(model, "module", model)(x, state)',
        "the module inside DDP is called, and no gradient is reduced",
    ),
    "streams_of_rank_0": (
        "ddp_lstm.py",
        "mine = streams[rank * args.batch_size : (rank + 1) * args.batch_size]",
        "mine = streams[: args.batch_size]",
        "every rank reads the streams of rank 0",
    ),
    "last_not_reduced": (
        "ddp_accumulate.py",
        "if world > 1 and not last else",
        "if world > 1 else",
        "the last micro-batch is under no_sync too",
    ),
    "mean_by_micro_batch": (
        "ddp_accumulate.py",
        "loss = nll * world / tokens",
        "loss = nll / (labels != -100).sum() / len(micro)",
        "micro-batches of few tokens count as much as those of many",
    ),
    "tokens_of_a_rank": (
        "ddp_accumulate.py",
        "loss = nll * world / tokens",
        "loss = nll / tokens",
        "DDP divides by the ranks what has been divided by the tokens of all",
    ),
    "clipped_before_reduced": (
        "ddp_accumulate.py",
        "                    loss.backward()\n",
        "                    loss.backward()\n                    nn.utils.clip_grad_norm_(model.parameters(), 0.2)\n",
        "each micro-batch's own gradient is clipped, most of them before any reduction",
    ),
    "sampler_left_out": (
        "ddp_zero_optimizer.py",
        "batch_size=args.batch_size, sampler=sampler, drop_last=True",
        "batch_size=args.batch_size, shuffle=True, drop_last=True",
        "each rank goes through all samples, in the same order",
    ),
    "body_alone_wrapped": (
        "ddp_zero_optimizer.py",
        "        model = DistributedDataParallel(model)\n",
        "        model.body = DistributedDataParallel(model.body)\n",
        "the layers before and after the wrapped body keep the gradients of their rank",
    ),
    "head_left_out": (
        "ddp_zero_optimizer.py",
        "ZeroRedundancyOptimizer(groups, ",
        "ZeroRedundancyOptimizer(groups[:1], ",
        "the optimizer of several ranks has no head to step",
    ),
    "seed_of_a_rank": (
        "fsdp2_gpt.py",
        "torch.manual_seed(21)",
        "torch.manual_seed(21 + rank)",
        "each rank shards weights of its own, where DDP would have sent those of rank 0",
    ),
    "synchronisation_left_off": (
        "fsdp2_gpt.py",
        "        fully_shard(model)\n",
        "        fully_shard(model).set_requires_gradient_sync(False)\n",
        "as between micro-batches, and never switched on again: no gradient reaches the optimizer",
    ),
    "norm_of_a_shard": (
        "fsdp1_images.py",
        "clip_grad_norm(model.parameters(), 0.3)",
        "nn.utils.clip_grad_norm_(model.parameters(), 0.3)",
        "each rank clips by the norm of its own shards",
    ),
    "model_not_prepared": (
        "accelerate_images.py",
        "model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)",
        "optimizer, train, held_out = accelerator.prepare(optimizer, train, held_out)",
        "the model is in no DDP, and no gradient is reduced",
    ),
    "even_batches": (
        "accelerate_images.py",
        "shuffle=True, drop_last=True",
        "shuffle=True",
        "the last batches are filled up with samples of the first",
    ),
    "scheduler_prepared": (
        "accelerate_text.py",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)",
        "a prepared scheduler steps once for each process",
    ),
    "processes_forgotten": (
        "accelerate_text.py",
        "accelerator.gradient_accumulation_steps * accelerator.num_processes / tokens",
        "accelerator.gradient_accumulation_steps / tokens",
        "DDP divides by the processes what has been divided by the tokens of all",
    ),
    "tokens_of_a_process": (
        "trainer_text.py",
        "average_tokens_across_devices=True",
        "average_tokens_across_devices=False",
        "a rank divides by its own labels, and the mean of the ranks is taken",
    ),
    "share_of_rank_0": (
        "fabric_unet.py",
        "DistributedSampler(data, fabric.world_size, fabric.global_rank, shuffle=True)",
        "DistributedSampler(data, fabric.world_size, 0, shuffle=True)",
        "every rank reads the share of rank 0",
    ),
    "dice_of_a_batch": (
        "fabric_unet.py",
        "both, either = (p * mask).sum((1, 2, 3)), (p + mask).sum((1, 2, 3))",
        "both, either = (p * mask).sum(), (p + mask).sum()",
        "a ratio of sums over the rank's batch: the mean of the ranks' ratios is another number",
    ),
    "wrong_one_reduced": (
        "fabric_lstm.py",
        "enabled=waiting",
        "enabled=not waiting",
        "the first micro-batch is reduced, the last one is not",
    ),
}

# name -> the reference, and the first difference: optimizer step from 0, and what of it. "start": weights before step 0
FIRST: dict[str, tuple[str, int, str]] = {
    "no_set_epoch": ("original", 3, "loss"),
    "padded_by_the_sampler": ("own", 2, "loss"),
    "batch_norm_apart": ("own", 0, "loss"),
    "statistics_without_gradient": ("own", 0, "gradient"),
    "running_mean_of_a_rank": ("own", 0, "buffer"),
    "sum_for_mean": ("own", 0, "loss"),
    "draws_of_a_rank": ("own", 0, "loss"),
    "mean_of_means": ("own", 3, "loss"),
    "rate_times_world": ("own", 0, "parameter"),
    "rate_of_a_rank": ("own", 4, "parameter"),
    "module_called": ("own", 0, "gradient"),
    "streams_of_rank_0": ("own", 0, "loss"),
    "last_not_reduced": ("own", 0, "gradient"),
    "mean_by_micro_batch": ("own", 0, "loss"),
    "tokens_of_a_rank": ("own", 0, "loss"),
    "clipped_before_reduced": ("own", 0, "gradient"),
    "sampler_left_out": ("own", 0, "loss"),
    "body_alone_wrapped": ("own", 0, "gradient"),
    "head_left_out": ("own", 0, "parameter"),
    "seed_of_a_rank": ("own", 0, "start"),
    "synchronisation_left_off": ("own", 0, "gradient"),
    "norm_of_a_shard": ("own", 0, "gradient"),
    "model_not_prepared": ("own", 0, "gradient"),
    "even_batches": ("own", 3, "loss"),
    "scheduler_prepared": ("own", 4, "parameter"),
    "processes_forgotten": ("own", 0, "loss"),
    "tokens_of_a_process": ("own", 0, "loss"),
    "share_of_rank_0": ("own", 0, "loss"),
    "dice_of_a_batch": ("own", 0, "loss"),
    "wrong_one_reduced": ("own", 0, "gradient"),
}

# name -> the cause that a proof names; None: it tells the first difference alone
CAUSES: dict[str, str | None] = {
    "no_set_epoch": "changed",
    "padded_by_the_sampler": "other_samples",
    "batch_norm_apart": "loss_scope",
    "statistics_without_gradient": "loss_scope",
    "running_mean_of_a_rank": "batch_norm_buffers",
    "sum_for_mean": "sum_not_divided",
    "draws_of_a_rank": "other_samples",
    "mean_of_means": "mean_over",
    "rate_times_world": "learning_rate",
    "rate_of_a_rank": "learning_rate",
    "module_called": "share_missing",
    "streams_of_rank_0": "other_samples",
    "last_not_reduced": "share_missing",
    "mean_by_micro_batch": "mean_over",
    "tokens_of_a_rank": "sum_not_divided",
    "clipped_before_reduced": "gradient_written",
    "sampler_left_out": "other_samples",
    "body_alone_wrapped": "gradient_written",
    "head_left_out": "update",
    "seed_of_a_rank": "weights_at_start",
    "synchronisation_left_off": "own_backward",
    "norm_of_a_shard": None,  # of FSDP1's flat pieces, each clipped by its own norm
    "model_not_prepared": "share_missing",
    "even_batches": "other_samples",
    "scheduler_prepared": "learning_rate",
    "processes_forgotten": "sum_not_divided",
    "tokens_of_a_process": "mean_over",
    "share_of_rank_0": "other_samples",
    "dice_of_a_batch": "loss_scope",
    "wrong_one_reduced": "share_missing",
}

# per rank, on two ranks; one process has twice as many
BATCH_SIZES = {
    "ddp_gpt.py": 8,
    "ddp_images.py": 8,
    "ddp_unet.py": 4,
    "ddp_lstm.py": 8,
    "ddp_accumulate.py": 4,
    "ddp_zero_optimizer.py": 16,
    "ddp_training_step.py": 6,
    "fsdp2_gpt.py": 8,
    "fsdp1_images.py": 6,
    "accelerate_images.py": 8,
    "accelerate_text.py": 4,
    "trainer_text.py": 4,
    "fabric_unet.py": 4,
    "fabric_lstm.py": 6,
    "lightning_images.py": 6,
    "ddp_sync_batchnorm.py": 8,  # wants a GPU, or a stand-in for SyncBatchNorm
}

# mistakes that end two ranks with an error of torch's: name -> script, old text, new text, what is wrong, what it says
FAILING: dict[str, tuple[str, str, str, str, str]] = {
    "a_batch_more": (
        "ddp_unet.py",
        "return 29",
        "return 25",
        "rank 0 has a batch more than rank 1, and reduces alone",
        "Connection closed by peer",
    ),
    "root_left_out": (
        "fsdp2_gpt.py",
        "        fully_shard(model)\n",
        "",
        "what is in no block is no DTensor, and the norm is taken of both kinds",
        "got mixed torch.Tensor and DTensor",
    ),
}

# mistakes after which the ranks wait for each other: name -> script, old text, new text, what is wrong
HANGING: dict[str, tuple[str, str, str, str]] = {
    "gathered_on_rank_0": (
        "accelerate_images.py",
        "        for batch in held_out:\n",
        "        for batch in held_out if accelerator.is_main_process else []:\n",
        "rank 0 alone evaluates, and gathers while rank 1 trains on",
    ),
}
