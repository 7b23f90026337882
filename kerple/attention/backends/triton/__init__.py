"""The fused backend: `launch` prepares and launches the Triton kernels in `kernels`, and imports
them on first use.
"""
