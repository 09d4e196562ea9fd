"""A package, so that its fixtures of the scope `package` end with it: an idle service takes CPU time of all other tests."""
