"""vLLM as we run it: its options, what runs inside of its processes, and the messages to them."""
