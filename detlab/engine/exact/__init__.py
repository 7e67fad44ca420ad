"""The exact tier, spec `tri4`: every reduction is an exact sum of integers, so that no order of additions can matter."""
