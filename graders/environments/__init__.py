"""Environments of python graders: one set of pinned packages for each `image_tag`, separate from the service's.

`catalog` finds the environments that are built on this machine, `build` builds them.
"""
