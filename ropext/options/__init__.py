"""Declare the options: each is typed once with its default, and refused if it is out of range.

The fields of these classes give the flags of the commands, the keys of a recipe, their help,
defaults, choices and checks. A field's name is its flag (`beta_fast`
is `--beta-fast`). A command imports only the classes whose flags it has.
"""
