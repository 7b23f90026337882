"""Experiments of many runs from one file: what is missing is trained and evaluated, what is finished is left alone."""
