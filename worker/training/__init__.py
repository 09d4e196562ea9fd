"""From graded groups to a better adapter: GRPO, losses, batches, gradients, the optimizer."""
