"""Runs code that nobody has read: one locked-down process per grade, forked from a warm one per source.

`pool` is the service's side. `zygote`, `lockdown` and `syscalls` also run on the other side, in a bare
interpreter: they import the standard library and each other, nothing else.
"""
