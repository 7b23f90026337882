"""Token files (`.bin/.idx`) as training samples and evaluation text."""
