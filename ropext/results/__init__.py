"""What was measured, and what follows from it: values with error bars, pairing, comparison, gates.

Pure: numpy arrays and numbers in, values out. No torch, no model, no clock. Reading and writing a
run directory (`rundir`) is the one place that touches files.
"""
