"""The packages that python graders may import: one pinned set for each `image_tag`, separate from the service's.

`catalog` finds the sets that are built on this machine, `build` builds them.
"""
