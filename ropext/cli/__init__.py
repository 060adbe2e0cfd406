"""Run the command line: the only package that prints, exits and reads option strings."""
