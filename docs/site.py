"""For mkdocs. A hook: README.md and the other texts outside of docs/ are pages too, links between
pages hold, and links to code are text. An extension of the reference: what makes a dataclass."""

import pathlib
import posixpath
import re

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
TEXTS = {
    "README.md": "index.md",
    "pallas_flash/DESIGN.md": "design.md",
    "pallas_flash/FEATURES.md": "features.md",
    "scripts/results.md": "results.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
PICTURES = {
    path.relative_to(ROOT).as_posix(): f"design/{path.name}"
    for path in (ROOT / "pallas_flash" / "design").glob("*.svg")
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files, config):
    for source, page in {**TEXTS, **PICTURES}.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, **_):
    sources = {page: source for source, page in TEXTS.items()}
    folder = posixpath.dirname(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def to_page(link):
        mark, text, path, heading = link.groups()
        source = posixpath.normpath(posixpath.join(folder, path))
        target = {**TEXTS, **PICTURES}.get(source)
        if source.startswith("docs/"):
            target = source.removeprefix("docs/")
        return f"{mark}[{text}]({target}{heading or ''})" if target else text

    parts = re.split(r"(```.*?```)", markdown, flags=re.S)  # code is at the odd places
    return "".join(part if i % 2 else LINK.sub(to_page, part) for i, part in enumerate(parts))


class Dataclasses(griffe.Extension):
    """Classes under `pytrees.dataclass` get the signature of a dataclass."""

    def on_class_instance(self, *, cls, **_):
        for decorator in cls.decorators:
            if str(decorator.value).startswith("pytrees.dataclass"):
                decorator.value = griffe.ExprName("dataclasses.dataclass")
