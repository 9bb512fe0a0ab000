#!/usr/bin/env python3
"""Checks without a compiler that each crate's package holds its sources, what they include and the licences, and that no
dependency needs a newer Rust than ours promise.

    .ci/crates.py    prints each breach; exits 1 if there is one
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"]
LICENCES = ["LICENSE-APACHE", "LICENSE-MIT"]
COMMENT = re.compile(r"^\s*//.*$", re.MULTILINE)
# The argument may itself be a macro's call, such as concat!("a/", $name).
INCLUDE = re.compile(r"\binclude(?:_str|_bytes)?!\s*\(\s*((?:[^()]|\([^()]*\))*)\)")
PATH = re.compile(r'#\[\s*path\s*=\s*"([^"]+)"')
PARTS = re.compile(r'"([^"]*)"|[^\s,]+')
MANIFEST = 'env!("CARGO_MANIFEST_DIR")'


def run(*words):
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(words)}: {result.stderr}")
    return result.stdout


def metadata(manifest):
    words = ["cargo", "metadata", "--format-version", "1", "--locked", "--all-features", "--manifest-path", manifest]
    # Other platforms' packages, which onehop is not for, would be downloaded.
    return json.loads(run(*words, *(word for one in PLATFORMS for word in ("--filter-platform", one))))


def included(source):
    """Patterns of what a source file includes, each with the folder that it is relative to; * is what a macro fills in."""
    text = COMMENT.sub("", source.read_text())
    for path in PATH.findall(text):
        yield None, path
    for argument in INCLUDE.findall(text):
        from_manifest = MANIFEST in argument
        inner = argument.replace(MANIFEST, "").strip().removeprefix("concat!(").removesuffix(")")
        parts = [literal if whole.startswith('"') else "*" for whole, literal in
                 ((match.group(0), match.group(1)) for match in PARTS.finditer(inner))]
        pattern = "".join(parts)
        yield ("manifest", pattern.lstrip("/")) if from_manifest else (None, pattern)


def package(one):
    """Breaches of a package that is published, and how many files its code includes."""
    folder = Path(one["manifest_path"]).parent
    name = one["name"]
    held = set(run("cargo", "package", "--list", "--allow-dirty", "--offline", "-p", name).split("\n"))
    breaches = [f"{name}: its package has no {file}" for file in LICENCES + ["src"]
                if not any(path == file or path.startswith(f"{file}/") for path in held)]
    for licence in LICENCES:
        if (folder / licence).is_file() and (folder / licence).read_bytes() != (ROOT / licence).read_bytes():
            breaches.append(f"{name}: its {licence} is not the project's")
    for kept in one["targets"]:
        source = os.path.relpath(kept["src_path"], folder)
        if {"lib", "bin", "cdylib", "proc-macro", "custom-build"} & set(kept["kind"]) and source not in held:
            breaches.append(f"{name}: its package has no {source}")
    count = 0
    for source in [*folder.glob("src/**/*.rs"), *folder.glob("build.rs")]:
        where = source.relative_to(folder)
        if str(where) not in held:
            breaches.append(f"{name}: its package has no {where}")
        for base, pattern in included(source):
            start = folder if base else source.parent
            wanted = os.path.relpath(start / pattern, folder)
            outside = wanted.startswith("..")
            files = [] if outside else [str(path.relative_to(folder)) for path in folder.glob(wanted)]
            if not files:
                breaches.append(f"{name}: {where} includes {pattern}, and no file of the crate has that name")
            breaches += [f"{name}: {where} includes {file}, which its package lacks" for file in files if file not in held]
            count += len(files)
    return breaches, count


def version(text):
    return tuple(int(part) for part in (text.split(".") + ["0", "0"])[:3])


def newer(manifest):
    """Packages that need a newer Rust than the workspace of this manifest promises, and how many were asked."""
    all_of = metadata(manifest)
    roots = [one for one in all_of["packages"] if one["id"] in all_of["workspace_members"]]
    promised = {one["rust_version"] for one in roots}
    if len(promised) != 1 or None in promised:
        return [f"{manifest}: its packages promise several versions of Rust, or none: {promised}"], 0
    most = promised.pop()
    asked = [one for one in all_of["packages"] if one["rust_version"]]
    return [f"{one['name']} {one['version']} needs Rust {one['rust_version']}, and {manifest} promises {most}"
            for one in asked if version(one["rust_version"]) > version(most)], len(asked)


def main():
    members = metadata("Cargo.toml")
    # An empty list is `publish = false`.
    public = [one for one in members["packages"] if one["id"] in members["workspace_members"] and one["publish"] != []]
    results = [package(one) for one in public]
    breaches = [breach for found, _ in results for breach in found]
    asked = 0
    for manifest in ["Cargo.toml", "python/Cargo.toml"]:
        found, count = newer(manifest)
        breaches += found
        asked += count
    included_files = sum(count for _, count in results)
    if not public or not included_files or not asked:
        breaches.append("no package, no included file, or no version of Rust was found, so little was checked")
    print("\n".join(breaches), end="\n" if breaches else "")
    checked = f"{len(public)} packages, {included_files} files that code includes, {asked} versions of Rust"
    print(f"{checked}: {len(breaches)} breaches")
    sys.exit(bool(breaches))


main()
