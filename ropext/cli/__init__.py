"""The command line: the only room that prints, exits and reads option strings."""
