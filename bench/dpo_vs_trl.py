"""Preference steps, ours beside TRL's DPOTrainer: bench/offline.py."""

from bench.offline import main

if __name__ == "__main__":
    main("dpo", "dpo_vs_trl")
