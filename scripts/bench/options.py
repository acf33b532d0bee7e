"""What the scripts' command lines have in common."""

import argparse
import itertools
import pathlib


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where it says something, and a list as it is typed."""

    def _get_help_string(self, action):
        if isinstance(action.default, list | tuple):
            return f"{action.help} (default: {' '.join(map(str, action.default)) or 'none'})"
        says_nothing = action.default is None or isinstance(action.default, bool | dict)
        return action.help if says_nothing else super()._get_help_string(action)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def numbered(stem: pathlib.Path) -> pathlib.Path:
    """A new folder, of the first number that is free: stem-1, stem-2, ..."""
    for number in itertools.count(1):
        folder = stem.with_name(f"{stem.name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
