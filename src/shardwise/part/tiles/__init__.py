"""Tiles: operations that read a rank's neighbours along a cut dim, their halo exchanges, and what backward keeps.

Such an operation is answered above autograd. A differentiable fetch gets what this rank's outputs read, dim by dim, so
that corners come along, and the plain operation runs on it; the fetch's backward sends gradients to their owners, which
add them. If torch chooses an operation by a tensor's strides (a linear layer's bias), the function on tiles chooses
instead, because a share of one row may have several strides, and ranks must issue collectives in one order. The
gradient of what was computed of whole tensors alone is gathered.
"""
