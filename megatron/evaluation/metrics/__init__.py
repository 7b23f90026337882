"""Metrics besides the loss: attention resolution, passkey retrieval, effective lengths."""
