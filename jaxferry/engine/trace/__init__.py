"""Records when each task of a step started and ended."""
