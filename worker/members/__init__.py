"""Machines that compute for the runs of another machine: `regraft-server member`."""
