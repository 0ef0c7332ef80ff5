"""Write the generated pages of the documentation: `python docs/generate.py`, or `--check` that they are up to date."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.layout import rules

HERE = Path(__file__).parent


def compatibility() -> str:
    """docs/compatibility.md, from the rules that the engine refuses by."""
    return (
        "# What cannot combine\n\n"
        "Generated from `src/shardwise/layout/rules.py` by `docs/generate.py`; change it there.\n"
        "A plan that meets a line below is refused before anything runs, with the reason given here.\n"
        "*Not built*: the technique does not exist yet. *Illegal*: the combination cannot be right.\n\n"
        + rules.as_markdown()
    )


PAGES = {"compatibility.md": compatibility}


def main() -> int:
    """Write the pages, or tell which are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is stale")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        path, text = HERE / name, make()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text)
            print(f"wrote {name}")
    if check and stale:
        print(f"stale: {', '.join(stale)}; run python docs/generate.py")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
