"""Transports: they move parameters and gradients between host and device."""
