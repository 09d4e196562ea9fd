"""Headers of server-sent events."""

# The second one is for nginx, which would collect events into blocks.
UNBUFFERED = {"cache-control": "no-store", "x-accel-buffering": "no"}
