"""AutoSpeed: a detector of the closest in-path object, its data and its training."""
