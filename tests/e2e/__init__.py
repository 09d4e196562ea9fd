"""A package, so that fixtures of the scope `package` end with it: idle services take time from all other tests."""
