"""Units of numbers that people read."""

GIB = 2**30  # bytes
