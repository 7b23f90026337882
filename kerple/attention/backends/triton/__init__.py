"""The fused backend: `launch` launches the Triton kernels, and imports them on first use."""
