"""What the scripts' command lines have in common."""

import argparse
import itertools
import pathlib


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but None and flags, and lists as they are typed."""

    def _get_help_string(self, action):
        if isinstance(action.default, list | tuple):
            return f"{action.help} (default: {' '.join(map(str, action.default)) or 'none'})"
        is_hidden = action.default is None or isinstance(action.default, bool | dict)
        return action.help if is_hidden else super()._get_help_string(action)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def make_next_folder(stem: pathlib.Path) -> pathlib.Path:
    """The first of stem-1, stem-2, ... that does not exist."""
    for i in itertools.count(1):
        folder = stem.with_name(f"{stem.name}-{i}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
