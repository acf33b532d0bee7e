"""Pictures by matplotlib, which is in the extra `train`, and how they are written."""

import pathlib
import sys

try:
    import matplotlib
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle
except ModuleNotFoundError as error:
    program = pathlib.Path(sys.argv[0]).name
    raise SystemExit(f"{program}: error: {error}. Run pip install '.[train]'.") from None

__all__ = ["Figure", "ListedColormap", "Patch", "Rectangle", "matplotlib", "write"]


def write(figure: Figure, path: pathlib.Path, **options):
    """Makes the folder too. What cannot be written is one line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, facecolor="white", **options)
    except (OSError, ValueError) as error:  # ValueError: of a format that there is not
        raise SystemExit(f"{pathlib.Path(sys.argv[0]).name}: error: --out: {error}") from None
    print(f"written    {path}")
