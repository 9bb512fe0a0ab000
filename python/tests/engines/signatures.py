"""Compares the mock serving engines here with real ones: signatures.py FOLDER, an unpacked wheel or source tree with
`vllm`, `sglang` or `lmcache` in it. The real one must have all that the mock has, with at least the same parameters.
"""

import ast
import sys
from pathlib import Path

HERE = Path(__file__).parent

#: Intended differences of mocks: dataclasses in the real one, and stand-ins for others of a kind.
OTHERWISE = {"has_gpu", "MemoryObj.__init__", "LoadConfig.__init__", "DefaultModelLoader.Source", "HookRegistry.hooks", "QuantizedLoader"}
#: Module-level names that the plugin also relies on.
NAMES = {
    "vllm/model_executor/model_loader/__init__.py": ["_LOAD_FORMAT_TO_MODEL_LOADER", "register_model_loader"],
    "sglang/srt/mem_cache/hicache_storage.py": [
        "is_mla_model: bool",
        "tp_size: int",
        "extra_config:",
        "kv_hit_pages: int\n    extra_pool_hit_pages:",
        "restorable_prefix_pages:",
    ],
    "sglang/srt/mem_cache/storage/backend_factory.py": ["backend_class(storage_config, kwargs)"],
    "lmcache/v1/storage_backend/__init__.py": [
        "storage_plugin.{storage_plugin}.module_path",
        "local_cpu_backend=local_cpu_backend",
        "dst_device=dst_device",
    ],
}


def functions(tree, prefix=""):
    """Names of functions and methods, with their parameters."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            every = node.args
            names = [a.arg for a in every.posonlyargs + every.args + every.kwonlyargs]
            found[prefix + node.name] = (names, every.vararg is not None or every.kwarg is not None)
        elif isinstance(node, ast.Assign):
            # An alias of a function, whose parameters are not visible here.
            found |= {prefix + target.id: ([], True) for target in node.targets if isinstance(target, ast.Name)}
    return found


def differences(mock, real):
    """What the real module lacks of the mock's."""
    mine, theirs = (functions(ast.parse(path.read_text())) for path in (mock, real))
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
    for mock in sorted(HERE.glob("*/**/*.py")):
        relative = mock.relative_to(HERE)
        real = folder / relative
        if not (folder / relative.parts[0]).is_dir() or not mock.read_text().strip():
            continue
        if not real.exists():
            found.append(f"{real}: is not there")
            continue
        compared += 1
        found += differences(mock, real)
        text = real.read_text()
        found += [f"{real}: has no {name}" for name in NAMES.get(str(relative), []) if name not in text]
    return found, compared


if __name__ == "__main__":
    different, modules = compare(Path(sys.argv[1]))
    print("\n".join(different))
    print(f"{modules} modules compared, {len(different)} differences")
    sys.exit(bool(different) or modules == 0)
