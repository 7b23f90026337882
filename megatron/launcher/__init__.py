"""deepy.py's work: one merged, validated configuration -> DeepSpeed's launcher."""
