"""Checkpoints that are complete or absent, load under any plan, and let a run continue exactly.

pieces     which elements of an unsharded tensor a rank holds, and copying the elements that two pieces share
files      writing, syncing and renaming (a test can end the process before each), the layout of safetensors
manifest   the content of a checkpoint: tensors, pieces, files with their digests, and all other state
publish    writes a rank's file, then the manifest, renames the folder, and removes old checkpoints
stored     reads pieces of tensors of a checkpoint, or of other safetensors files
holdings   the tensors that a rank of an engine holds, as pieces
save       saves an engine's state while training goes on
load       loads a checkpoint into an engine, after verifying it

`torch.distributed.checkpoint` is not used because its chunks are boxes, while a rank's share may be interleaved heads;
its planning exchanges pickles; and it has no digests, so a crash during an overwrite leaves a mixture that loads.
"""
