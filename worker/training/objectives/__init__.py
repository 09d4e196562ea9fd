"""The objectives of sampled answers, a file for each kind. registry.py names the one of each loss."""
