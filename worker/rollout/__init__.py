"""From prompts to graded groups: prompts, samplers, rewards."""
