"""Pallas kernels, one folder for each family of GPUs."""


def joined(*reasons: str | None) -> str | None:
    """All reasons in one text, or None. The first is what the machine lacks: no other call mends
    that."""
    return ". Also: ".join(filter(None, reasons)) or None
