"""Jobs that learn from the answers in their file: supervised and dpo. Nothing is sampled or graded.

run.py has the loop; rows.py makes tokens of rows; worker/learn/offline.py computes losses and gradients.
"""
