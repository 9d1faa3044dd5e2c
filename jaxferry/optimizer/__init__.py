"""Optax in host memory, layer by layer, and where masters and optimizer state are.

optimizer     which leaves are updated together   update_programs, fused   their update
arrays        the arrays of a state               pieces                   arrays whole or in parts
optimizers    adamw, adam, lion, sgd              host_memory              how much is left
"""
