"""What a strict build of the site does not check: files that pages load, the network, and pages without a place.

    python tools/check_site.py [SITE]     exit status 1 and a line for each fault

Every src and every link inside the site leads to a file of it, and to an anchor that is there. Nothing is loaded from
another host: no script, style, font or picture. Each page of docs/ has one entry in the navigation of zensical.toml.
"""

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent


class Page(HTMLParser):
    """What one page loads, links to and can be linked at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the addresses and the id of one element."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("link", "use", "image") and "href" in values and values.get("rel") != "canonical":
            self.loads.append(values["href"])
        self.loads += [values[name] for name in ("src", "poster", "data") if name in values]
        self.loads += [part.split()[0] for part in values.get("srcset", "").split(",") if part.strip()]
        self.loads += addresses(values.get("style", ""))


def addresses(css: str) -> list[str]:
    """Return what a style sheet loads."""
    return re.findall(r"url\(\s*['\"]?([^'\")]+)", css) + re.findall(r"@import\s+['\"]([^'\"]+)", css)


def is_remote(address: str) -> bool:
    """Return whether an address leaves the site."""
    return bool(urlsplit(address).netloc) or urlsplit(address).scheme in ("http", "https")


def faults(site: Path) -> Iterator[str]:
    """Yield a line for each fault of a built site."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: there is no page; make docs builds them"
    for path, page in pages.items():
        if path.name == "404.html":  # served for any address, so its links begin at the root of the host
            continue
        where = path.relative_to(site)
        for address in page.loads:
            if is_remote(address):
                yield f"{where}: loads {address} from the network"
        for address in dict.fromkeys(page.loads + page.links):
            parts = urlsplit(address)
            if is_remote(address) or parts.scheme in ("data", "mailto", "javascript"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or not target.is_relative_to(site.resolve()):
                yield f"{where}: {address} leads to no file of the site"
            elif parts.fragment and target.suffix == ".html":
                anchors = pages[site / target.relative_to(site.resolve())].anchors
                if unquote(parts.fragment) not in anchors:
                    yield f"{where}: {address} leads to no anchor"
    for path in sorted(site.rglob("*.css")):
        for address in addresses(path.read_text(encoding="utf-8")):
            if is_remote(address):
                yield f"{path.relative_to(site)}: loads {address} from the network"


def entries(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation, in its order."""
    if isinstance(nav, str):
        yield nav
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from entries(entry)


def faults_of_navigation(root: Path) -> Iterator[str]:
    """Yield a line for each page of docs/ that the navigation lacks, has twice, or has without a file."""
    config = tomllib.loads((root / "zensical.toml").read_text(encoding="utf-8"))
    placed = Counter(entries(config["project"]["nav"]))
    written = {path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")}
    for page in sorted(written | set(placed)):
        if page not in written:
            yield f"zensical.toml: docs/{page} is not there"
        elif placed[page] != 1:
            yield f"zensical.toml: docs/{page} has {placed[page]} entries in `nav`; expected one"


def main(arguments: list[str]) -> int:
    """Print the faults; return 1 if there is one."""
    found = [*faults_of_navigation(ROOT), *faults(Path(arguments[0]) if arguments else ROOT / "site")]
    print("\n".join(found) or "every page, file and anchor is there, and nothing comes from the network")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
