"""deepy.py: starts a script on every GPU of one or more machines."""
