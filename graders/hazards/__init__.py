"""Run our own code on untrusted input in processes with time and memory limits.

`table` lists the functions and their limits, `pool` runs in the service, and `zygote` in the limited process.
"""
