"""Compares the miniatures of serving engines here with real ones: signatures.py FOLDER, an unpacked wheel or a source tree that
has `vllm` or `sglang` in it. What the miniature has, the real one has to have, with its parameters among the real ones.
"""

import ast
import sys
from pathlib import Path

HERE = Path(__file__).parent

#: Where a miniature differs on purpose: what the real one has as a dataclass, or what stands for others of its kind.
OTHERWISE = {"LoadConfig.__init__", "DefaultModelLoader.Source", "HookRegistry.hooks", "QuantizedLoader"}
#: Of each engine, what the plugin relies on beyond these: names at the level of modules.
NAMES = {"vllm/model_executor/model_loader/__init__.py": ["_LOAD_FORMAT_TO_MODEL_LOADER", "register_model_loader"]}


def functions(tree, prefix=""):
    """Names of functions and methods, with their parameters."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            every = node.args
            names = [a.arg for a in every.posonlyargs + every.args + every.kwonlyargs]
            found[prefix + node.name] = (names, every.vararg is not None or every.kwarg is not None)
        elif isinstance(node, ast.Assign):
            # A function by another's name, whose parameters nobody sees here.
            found |= {prefix + target.id: ([], True) for target in node.targets if isinstance(target, ast.Name)}
    return found


def differences(miniature, real):
    """What the real module lacks of the miniature's."""
    mine, theirs = (functions(ast.parse(path.read_text())) for path in (miniature, real))
    for name, (parameters, _) in mine.items():
        if name.startswith("_") and "." not in name or any(name.startswith(other) for other in OTHERWISE):
            continue
        if name not in theirs:
            yield f"{real}: has no {name}"
            continue
        there, takes_more = theirs[name]
        for parameter in parameters:
            if parameter not in there and not takes_more:
                yield f"{real}: {name} has no parameter {parameter}, but {there}"


def compare(folder):
    """All differences, and how many modules were compared."""
    found, compared = [], 0
    for miniature in sorted(HERE.glob("*/**/*.py")):
        relative = miniature.relative_to(HERE)
        real = folder / relative
        if not (folder / relative.parts[0]).is_dir() or not miniature.read_text().strip():
            continue
        if not real.exists():
            found.append(f"{real}: is not there")
            continue
        compared += 1
        found += differences(miniature, real)
        text = real.read_text()
        found += [f"{real}: has no {name}" for name in NAMES.get(str(relative), []) if name not in text]
    return found, compared


if __name__ == "__main__":
    different, modules = compare(Path(sys.argv[1]))
    print("\n".join(different))
    print(f"{modules} modules compared, {len(different)} differences")
    sys.exit(bool(different) or modules == 0)
