"""This machine measured: products and other ops, collectives, what the engine adds; plans and ranks run on it."""
