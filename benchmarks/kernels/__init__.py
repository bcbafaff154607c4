"""GPU benchmarks of the kernels: `python -m benchmarks.kernels.run` from the repository root."""
