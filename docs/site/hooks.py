"""The site's pages that are files of the repository outside docs/, and links to such files.

README.md, CONTRIBUTING.md, SECURITY.md and CHANGELOG.md become pages; any other file that a page links to is published
under repository/. Links are written for the repository, where they work as they are, and changed for the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(\]\()([^)#\s:]+)([)#])")  # of this repository: no scheme, not only an anchor


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in [*files.documentation_pages()]:
        for match in LINK.finditer(page.content_string):
            target = in_repository(page.src_uri, match[2])
            uri = in_site(target)
            if uri.startswith("repository/") and (ROOT / target).is_file() and uri not in files.src_uris:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def moved(match: re.Match[str]) -> str:
        uri = in_site(in_repository(page.file.src_uri, match[2]))
        return match[1] + posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".") + match[3]

    return LINK.sub(moved, markdown)


def in_repository(page: str, link: str) -> str:
    """The path from the repository's root that a link on a page of the site means."""
    if page.startswith("repository/"):
        source = page.removeprefix("repository/")
    else:
        source = next((file for file, uri in PAGES.items() if uri == page), f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def in_site(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
