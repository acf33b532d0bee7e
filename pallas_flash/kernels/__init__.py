"""Pallas kernels, one folder for each family of GPUs."""


def joined(*reasons: str | None) -> str | None:
    """All reasons in one text, each once, or None. The first is what the machine lacks: no other
    call mends that."""
    also = ". Also: "
    each = also.join(filter(None, reasons)).split(also)
    return also.join(dict.fromkeys(each)) or None
