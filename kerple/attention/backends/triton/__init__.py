"""Triton kernels of the fused backend; imported when it first runs, so that nothing else needs Triton."""
