"""Metrics besides the loss: context utilization, attention resolution, passkey retrieval, effective lengths."""
