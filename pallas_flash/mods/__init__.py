"""Masks and scores from the inside, as functions of positions."""
