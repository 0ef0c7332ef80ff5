"""Checkpoints that cannot be torn, load under any plan, and let a run go on exactly.

pieces     which elements of a whole tensor a rank holds, and copying what two such pieces have in common
files      writing, syncing and renaming (each one a place where a test can end the process), safetensors' layout
manifest   what a checkpoint holds: tensors, pieces, files with their digests, and everything that is not a tensor
publish    a rank's file, then the manifest, the rename, and what may be removed afterwards
stored     tensors of a published checkpoint, or of other safetensors files, read piece by piece
holdings   what a rank of an engine holds, as pieces
save       an engine's state into a folder, while training goes on
load       a folder's state into an engine, verified before anything is changed

`torch.distributed.checkpoint` was not used: its chunks are boxes, and a rank's share may be interleaved heads; its
planning exchanges pickles; it has no digests, and a crash in an overwrite leaves a mixture that loads.
"""
