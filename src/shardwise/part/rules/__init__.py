"""What is known of each operation on cut tensors, one file for a family, registered side by side.

rule(names)            on shares: ATen's operation, below autograd (`part/tensor`)
label(names)           how labels of weights go through it, from which cuts are derived (`part/labels`): returns True
                       where it labelled the results, False where the inputs are to stay whole
over(names, dims=...)  both, of an operation that runs over some dims and keeps the others apart (`part/dimwise`)
answers(functions)     on tiles: torch's function, above autograd (`part/tiles/windows`)
done_whole, whole_without_rule   the same, of functions done whole, always or without a rule (`part/tiles/entire`)
"""

from shardwise.part.rules import (  # noqa: F401 - they register
    batch_norms,
    convolutions,
    creation,
    dim_order,
    embeddings,
    fourier,
    fused_attention,
    indexing,
    joins,
    losses,
    masks,
    norms,
    padding,
    patches,
    pointwise,
    pooling,
    products,
    random,
    rare,
    recurrent,
    reductions,
    resizing,
    scans,
    scatters,
    slices,
    softmax,
    views,
    writes,
)
