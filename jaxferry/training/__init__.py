"""The public training step.

train_step    TrainStep, its state and metrics   options       its arguments, checked
compiler      partition, plan, lower, compile    model         parameters and optimizer
prepared      a step for one batch structure     measure       measures a profile on the device
"""
