"""Tools that an episode calls. `protocol` has what all kinds have in common, `kinds` has one line for each kind."""
