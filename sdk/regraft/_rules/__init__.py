"""The server's own rules for rows, templates and commands: links to its sources, which are copied into the wheel."""
