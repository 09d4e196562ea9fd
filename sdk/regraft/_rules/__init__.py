"""The server's own rules for rows, templates, commands, rewards and secrets.

Links to its sources, which are copied into the wheel.
"""
