"""Jobs that learn from the rows of their file: supervised, dpo, reward models and distillation by `logits`.

experience.py is what a run learns from, rows.py makes tokens of rows, worker/training/offline.py computes losses.
"""
