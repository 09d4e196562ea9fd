"""`regraft-server doctor`: small checks of a machine and of the services that it uses, each with a remedy."""
