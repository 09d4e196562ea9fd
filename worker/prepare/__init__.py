"""From a claimed job to the parts of its run. What can be refused is refused before the weights are loaded."""
