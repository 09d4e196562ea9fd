"""Evals that users create: their rows, the states of their runs, stored items, and statistics."""
