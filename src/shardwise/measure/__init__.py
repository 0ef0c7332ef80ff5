"""Measures this machine (matrix products, other ops, collectives, the engine's overhead), and runs plans on it."""
