"""A mask of pallas_flash.masks, as it is typed on a command line."""

import argparse


def typed_mask(text: str):
    """The mask that an expression of the names in pallas_flash.masks makes."""
    from pallas_flash import masks

    try:
        mask = eval(text, vars(masks).copy())
    except (SyntaxError, NameError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} makes no mask: {error}") from error
    if not isinstance(mask, masks.Mask):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a mask such as Causal() & Dilated(4); it is a {type(mask).__name__}"
        )
    return mask
