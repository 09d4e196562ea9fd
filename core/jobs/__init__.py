"""Jobs: their lifecycle, queue, events, hyperparameters, usage and budgets."""
