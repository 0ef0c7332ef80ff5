"""What is known of each operation on cut tensors, one file for a family, registered side by side.

rule(names)            the decorated function computes ATen operations of these names on shares, below autograd
                       (`part/tensor`)
label(names)           the decorated function carries labels of weights, from which cuts are derived, through the
                       operation (`part/labels`); it returns True if it labelled the results, False if the labelled
                       inputs have to stay whole
over(names, dims=...)  registers both for an operation that runs over some dims alone (`part/dimwise`)
answers(functions)     the decorated function computes torch's functions on tiles, above autograd (`part/tiles/windows`)
done_whole, whole_without_rule   register functions of torch that run on gathered tiles, always or where a rule is
                                 missing (`part/tiles/entire`)
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
