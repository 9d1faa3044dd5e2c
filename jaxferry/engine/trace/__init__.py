"""When each task of a step started and ended."""
