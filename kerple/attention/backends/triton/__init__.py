"""The fused backend: `launch` prepares and launches the Triton kernels of `kernels`, which it imports on first use."""
