"""Tiles: what a rank reads of a cut dim beside its own share, and how long it is kept.

An operation that reads neighbours is answered above autograd: a differentiable fetch of what this rank's outputs read,
dim by dim, so that corners come along, then the plain operation on it; its backward gives back and adds. Where torch
chooses an operation by how a tensor lies in memory (a linear layer's bias), the function on tiles chooses in its place:
a share of one row lies in memory in several ways, and ranks must come to one order of collectives. What was computed of
whole tensors alone takes its gradient whole.
"""
