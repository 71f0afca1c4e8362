"""The kernels behind the models: `interface` is the seam, `reference` the NumPy oracle. Knows no model."""
