"""Run untrusted code: one locked-down process per grade, forked from a warm one per source.

`pool` runs in the service. `zygote`, `lockdown` and `syscalls` run in the sandbox, in a bare interpreter, so they
import only the standard library and each other.
"""
