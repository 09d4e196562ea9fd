"""Supervised steps, ours beside TRL's SFTTrainer: bench/offline.py."""

from bench.offline import main

if __name__ == "__main__":
    main("supervised", "sft_vs_trl")
