"""The routes: one file per noun."""
