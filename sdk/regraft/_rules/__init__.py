"""The server's own rules for rows and templates: links to its sources, which are copied into the wheel."""
