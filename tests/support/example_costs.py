"""A machine of round figures and the costs of one layer."""

from jaxferry.costs import LayerCosts, Machine

MACHINE = Machine(
    name="round",
    flops_per_s=1000.0,
    float32_flops_per_s=500.0,
    memory_bytes=1e6,
    memory_bytes_per_s=100.0,
    link_bytes_per_s=10.0,
    host_bytes_per_s=60.0,
    efficiency=0.5,
    launch_s=0.25,
    link_latency_s=0.125,
)
COSTS = LayerCosts(
    name="layer",
    num_parameters=40,
    param_bytes=80,
    grad_bytes=80,
    activation_bytes=7,
    forward_flops=1000,
    forward_bytes=100,
    backward_flops=2000,
    backward_bytes=100,
    dha_bytes_forward=30,
    dha_bytes_backward=90,
)
