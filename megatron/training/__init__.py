"""Training: the loop, DeepSpeed's engine and its patches, the optimizer step, and the log."""
