"""The command line of `python -m trainer`."""
