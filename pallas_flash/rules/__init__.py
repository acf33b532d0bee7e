"""Masks and scores on the inside: functions of positions, traced once and asked anywhere."""
