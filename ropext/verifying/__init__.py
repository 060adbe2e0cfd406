"""Compare a written model, or a running server, with its plan: spectrum, spellings, weights."""
