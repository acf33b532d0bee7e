"""README's code runs as it stands, and its file tree names the files that are there."""

import pathlib
import re

import pytest

from setup import for_an_index

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_code_runs_from_top_to_bottom():
    namespace = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(compile(code, "README.md", "exec"), namespace)
    assert namespace["o"].shape == namespace["q"].shape


def test_the_file_tree_names_every_file():
    tree = re.search(r"## The files\n\n```\n(.*?)```", README, re.S).group(1)
    named = set(re.findall(r"(\w+\.(?:py|md))", tree))
    files = [
        *ROOT.glob("pallas_flash/**/*.py"),
        *ROOT.glob("models/*.py"),
        *ROOT.glob("scripts/*"),
        *ROOT.glob("docs/*"),
    ]
    there = {path.name for path in files if path.is_file() and path.name != "__init__.py"}
    assert there - named == set(), "missing in the tree"
    assert named - there == {"cases.py", "oracle.py", "selection.py"}, "named but not there"


@pytest.mark.parametrize("repository", [None, "https://example.org/flash"])
def test_on_a_package_index_no_link_leads_nowhere(repository):
    links = re.compile(r"(!?)\[([^\]]*)\]\(([^)]*)\)")
    here, there = links.findall(README), links.findall(for_an_index(README, repository))
    assert all(target.startswith("https://") for *_, target in there)
    if repository:
        kinds = {"!": "raw", "": "blob"}
        assert there == [
            (mark, text, f"{repository}/{kinds[mark]}/main/{target}") for mark, text, target in here
        ]
    else:
        assert here and all(
            text in for_an_index(README, None) for mark, text, _ in here if not mark
        )
