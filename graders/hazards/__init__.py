"""Run our own code on untrusted input in processes with time and memory limits.

`table` has the functions and their limits, `pool` runs in the service, `zygote` in the limited process.
"""
