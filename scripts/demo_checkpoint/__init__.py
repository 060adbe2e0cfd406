"""What makes the bundled demo: its checkpoint (`train`, `export`) and its documents (`bundle`)."""
