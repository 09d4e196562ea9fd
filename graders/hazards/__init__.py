"""Runs our own code on untrusted input in processes with limits: what takes too long or too much memory is ended.

`table` has the computations and their limits, `pool` is the service's side, `zygote` the other one.
"""
