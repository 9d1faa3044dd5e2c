"""What runs on the host: the optimizer step, the layout of its state, and checkpoints."""
