"""Planted bugs: each is one changed place in the package, and a proof that must not call the plan equal."""
