"""mask_mod and score_mod from the inside: traced, bound to a call, differentiated."""
