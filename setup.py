"""All that pyproject.toml cannot say: README.md as a package index shows it."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parent
RELATIVE = r"\]\((?!\w+:|#)"


def for_an_index(readme: str, repository: str | None) -> str:
    """Links and pictures lead into the repository; as long as it has no address, links are text,
    and pictures are left out."""
    if repository:
        readme = re.sub(rf"(!\[[^\]]*){RELATIVE}", rf"\1]({repository}/raw/main/", readme)
        return re.sub(RELATIVE, f"]({repository}/blob/main/", readme)
    readme = re.sub(rf"!\[[^\]]*{RELATIVE}[^)]*\)\n*", "", readme)
    return re.sub(rf"\[([^\]]*){RELATIVE}[^)]*\)", r"\1", readme)


if __name__ == "__main__":
    import setuptools

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = for_an_index(
        (ROOT / "README.md").read_text(), project.get("urls", {}).get("Repository")
    )
    setuptools.setup(long_description=readme, long_description_content_type="text/markdown")
