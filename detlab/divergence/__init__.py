"""Where two traces part: alignment, first divergence, origins and carriers."""
