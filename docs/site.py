"""For mkdocs. A hook: README.md and the other texts outside of docs/ are pages too, links between
pages hold, links to code are text, and MathJax is part of the site. An extension of the reference:
what makes a dataclass, and which of its arguments are for users."""

import pathlib
import posixpath
import re

import griffe
import mathjax
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
TEXTS = {
    "README.md": "index.md",
    "scripts/results.md": "results.md",
    "pallas_flash/kernels/hopper/NOTES.md": "hopper.md",
    "pallas_flash/kernels/blackwell/NOTES.md": "blackwell.md",
    "pallas_flash/kernels/mma/NOTES.md": "mma.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
MATHJAX = pathlib.Path(mathjax.__file__).parent / "static" / "mathjax" / "es5"
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files, config):
    for source, page in TEXTS.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for path in (MATHJAX / "tex-chtml.js", *MATHJAX.glob("output/chtml/fonts/woff-v2/*")):
        page = f"mathjax/{path.relative_to(MATHJAX).as_posix()}"
        files.append(File.generated(config, page, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    sources = {page: source for source, page in TEXTS.items()}
    folder = posixpath.dirname(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def to_page(link):
        mark, text, path, heading = link.groups()
        source = posixpath.normpath(posixpath.join(folder, path))
        target = TEXTS.get(source)
        if source.startswith("docs/"):
            target = source.removeprefix("docs/")
        return f"{mark}[{text}]({target}{heading or ''})" if target else text

    parts = re.split(r"(```.*?```)", markdown, flags=re.S)  # code is at the odd places
    parts[::2] = (CODE.sub(unescaped, LINK.sub(to_page, part)) for part in parts[::2])
    return "".join(parts)


def unescaped(code):
    """In a table GitHub needs `\\|`, and mkdocs shows it."""
    return code[0].replace("\\|", "|")


class Dataclasses(griffe.Extension):
    """Classes under `pytrees.dataclass` get the signature of a dataclass."""

    def on_class_instance(self, *, cls, **_):
        for decorator in cls.decorators:
            if str(decorator.value).startswith("pytrees.dataclass"):
                decorator.value = griffe.ExprName("dataclasses.dataclass")

    def on_class_members(self, *, cls, **_):
        """Fields that a docstring with `Args:` does not name are not for users."""
        sections = cls.docstring.parse("google", warnings=False) if cls.docstring else []
        named = {
            x.name
            for s in sections
            if s.kind is griffe.DocstringSectionKind.parameters
            for x in s.value
        }
        is_field = lambda x: x.is_attribute and x.annotation is not None
        if named and any(name in named for name, x in cls.members.items() if is_field(x)):
            for name in [
                name for name, x in cls.members.items() if is_field(x) and name not in named
            ]:
                cls.del_member(name)
