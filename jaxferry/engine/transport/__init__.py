"""What moves parameters and gradients between host and device."""
