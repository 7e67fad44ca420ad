"""Traces: capturing what a model computes, row by row, and keeping it."""
