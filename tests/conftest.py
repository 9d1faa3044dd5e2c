"""What holds for every test: JAX runs on the CPU, and hypothesis tries the same cases each time."""

import os

import hypothesis

# Before any test module imports jax: where a machine has an accelerator, placement is tested without it all the same.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None)
hypothesis.settings.load_profile("deterministic")
