#!/usr/bin/env python3
"""Checks the documentation: links and anchors resolve, source files and their functions exist, prose keeps to 100 columns,
the README to 120 lines, and SUMMARY.md names every page.

    .ci/links.py [FILE...]      check these Markdown files, or all of the documentation
    .ci/links.py --book FOLDER  check the pages of a built book
    .ci/links.py --preprocess   preprocess chapters for mdBook: a link to a file outside docs/ becomes the file's path
"""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
COLUMNS = 100
README_LINES = 120
FENCE = re.compile(r"\s*(?:[-*>]\s+)*(```+|~~~+)")
CODE = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
INLINE = re.compile(r'\]\(\s*<?([^)\s>]*)>?(?:\s+"[^"]*")?\s*\)')
DEFINED = re.compile(r"^ {0,3}\[([^\]]+)\]:\s+(\S+)", re.MULTILINE)
REFERENCE = re.compile(r"\]\[([^\]]+)\]")
ATTRIBUTE = re.compile(r'<[a-z]+\s[^>]*?\b(?:href|src)="([^"]+)"')
OWN_ID = re.compile(r'<[a-z]+\s[^>]*?\b(?:id|name)="([^"]+)"')
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
EXTERNAL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:|//")
SOURCE = re.compile(r"`(crates/[\w./-]+\.rs)`")
# `Type::function` (`crates/a/src/b.rs`), or a function of a module.
FUNCTION = re.compile(r"`((?:\w+::)*)(\w+)`\s+\(`(crates/[\w./-]+\.rs)`\)")


def prose(text):
    """The lines of a page; those of code blocks are empty."""
    fence, lines = None, []
    for line in text.split("\n"):
        assert not (line.endswith("```") and not FENCE.match(line)), f"a code block ends within a line: {line}"
        mark = FENCE.match(line)
        if fence:
            fence = None if mark and mark[1].startswith(fence) and not line[mark.end() :].strip() else fence
            lines.append("")
        elif mark:
            fence = mark[1]
            lines.append("")
        else:
            lines.append(line)
    return lines


def anchors(lines):
    """The anchors of a page, as GitHub and mdBook make them from its headings."""
    found, seen = set(), {}
    for line in lines:
        found.update(OWN_ID.findall(line))
        heading = HEADING.match(line)
        if not heading:
            continue
        text = re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", heading[1]).replace("`", "").replace("*", "")
        slug = re.sub(r"\s", "-", "".join(c for c in text.lower() if c.isalnum() or c in "_- "))
        count = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def too_long(line):
    if line.lstrip().startswith("|"):
        # The target of a link cannot be wrapped in a table.
        return len(INLINE.sub("]", line)) > COLUMNS
    # Neither can a word, wherever it stands.
    return len(line) > COLUMNS and len(line.lstrip(" >-*0123456789.").split()) > 1


def check_page(path, pages):
    """Yields what is wrong with a page."""
    text = path.read_text(encoding="utf-8")
    lines = prose(text)
    for number, line in enumerate(lines, 1):
        if too_long(line):
            yield f"{number}: {len(line)} columns, {COLUMNS} at most"
    text = "\n".join(lines)
    for at, wrong in (*missing_sources(text), *missing_functions(text)):
        yield f"{text.count(chr(10), 0, at) + 1}: {wrong}"
    # What stands in code is no link.
    body = CODE.sub(lambda code: re.sub(r"[^\n]", "x", code[0]), text)
    defined = dict(DEFINED.findall(body))
    for use in REFERENCE.finditer(body):
        if use[1] not in defined:
            yield f"{body.count(chr(10), 0, use.start()) + 1}: no definition of [{use[1]}]"
    for pattern, group in ((INLINE, 1), (DEFINED, 2), (ATTRIBUTE, 1)):
        for link in pattern.finditer(body):
            wrong = check_link(path, link[group], pages)
            if wrong:
                yield f"{body.count(chr(10), 0, link.start()) + 1}: {link[group]}: {wrong}"


def missing_sources(text):
    for source in SOURCE.finditer(text):
        if not (ROOT / source[1]).is_file():
            yield source.start(), f"{source[1]}: no such file"


def missing_functions(text):
    for named in FUNCTION.finditer(text):
        file, function = ROOT / named[3], named[2]
        if not file.is_file():
            continue
        code = re.sub(r"//.*", "", file.read_text(encoding="utf-8"))
        if not re.search(rf"\bfn\s+{function}\b", code):
            yield named.start(), f"{named[3]}: no function {function}"
        owner = named[1].removesuffix("::").rpartition("::")[2]
        # A module has a small first letter.
        if owner[:1].isupper() and not re.search(rf"\b(?:impl|trait)\b[^{{;]*\b{owner}\b", code):
            yield named.start(), f"{named[3]}: no impl of {owner}"


def check_readme():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").count("\n")
    if lines > README_LINES:
        yield f"README.md: {lines} lines, {README_LINES} at most"


def check_link(path, target, pages):
    if EXTERNAL.match(target):
        return None
    name, _, anchor = unquote(target).partition("#")
    file = (path.parent / name).resolve() if name else path
    if not file.is_relative_to(ROOT):
        return "outside of the repository"
    if not file.exists():
        return "no such file"
    if not anchor:
        return None
    if file.suffix != ".md":
        return "an anchor in a file that is not Markdown"
    if file not in pages:
        pages[file] = anchors(prose(file.read_text(encoding="utf-8")))
    return None if anchor in pages[file] else "no such heading"


def check_summary():
    """Yields the pages that the book would leave out."""
    summary = DOCS / "SUMMARY.md"
    named = {(DOCS / link).resolve() for link in INLINE.findall(summary.read_text(encoding="utf-8"))}
    for page in sorted(DOCS.rglob("*.md")):
        if page != summary and page not in named:
            yield f"{page.relative_to(ROOT)}: SUMMARY.md does not name it"


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.ids.add(value)
            elif name in ("href", "src") and value and tag != "base":
                self.links.append(value)


def check_book(folder):
    # The links of 404.html start at the site's root, wherever that will be.
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html")) if path.name != "404.html"}
    if not pages:
        yield f"{folder}: no pages"
    for path, page in pages.items():
        for link in page.links:
            if EXTERNAL.match(link):
                continue
            name, _, anchor = unquote(link).partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists() or not file.is_relative_to(folder.resolve()):
                yield f"{path.name}: {link}: no such file"
            elif anchor and file in pages and anchor not in pages[file].ids:
                yield f"{path.name}: {link}: no such anchor"


def preprocess():
    def chapter(content, folder):
        def link(match):
            file = (folder / match[2].partition("#")[0]).resolve()
            if EXTERNAL.match(match[2]) or file.is_relative_to(DOCS):
                return match[0]
            name = str(file.relative_to(ROOT))
            return f"`{name}`" if match[1].strip("`") == name else f"{match[1]} (`{name}`)"

        return re.sub(r"(?<!!)\[((?:[^\[\]]|\n(?!\n))*)\]\(([^)\s]+)\)", link, content)

    def walk(items):
        for item in items:
            found = item.get("Chapter") if isinstance(item, dict) else None
            if found:
                if found["path"]:
                    found["content"] = chapter(found["content"], (DOCS / found["path"]).parent)
                walk(found["sub_items"])

    _, book = json.load(sys.stdin)
    walk(book["items"])
    json.dump(book, sys.stdout)


def main(args):
    if args[:1] == ["--preprocess"]:
        # mdBook first asks whether a renderer is supported; every one is.
        return 0 if args[1:2] == ["supports"] else preprocess()
    if args[:1] == ["--book"]:
        wrong = list(check_book(Path(args[1])))
    else:
        outside = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "kmod/README.md", "python/README.md"]
        every = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in outside)]
        files, pages = [Path(arg).resolve() for arg in args] or every, {}
        wrong = [f"{path.relative_to(ROOT)}:{what}" for path in files for what in check_page(path, pages)]
        wrong += [] if args else [*check_summary(), *check_readme()]
    print("\n".join(wrong) or "no broken link")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
