"""Masks and scores on the inside: functions of positions."""
