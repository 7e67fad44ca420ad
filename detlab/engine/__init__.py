"""The deterministic engine: an unmodified model whose bits depend on each token's own context alone."""
