"""What the user wants, typed once with its default, and refused where it is out of range.

From the fields of these classes come the flags of the commands, the keys of a recipe, their help,
defaults, choices and checks, and the recipe's JSON schema. A field's name is its flag (`beta_fast`
is `--beta-fast`). A command imports only the classes that it has flags of.
"""
