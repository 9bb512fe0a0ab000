import enum
import functools
import pkgutil


class HookType(enum.Enum):
    AROUND = "around"


class HookRegistry:
    hooks = []

    @classmethod
    def register(cls, target, hook, hook_type):
        assert hook_type is HookType.AROUND
        cls.hooks.append((target, hook))

    @classmethod
    def apply_hooks(cls):
        for target, hook in cls.hooks:
            owner, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(owner)
            original = getattr(owner, name)
            wrapped = functools.wraps(original)(lambda *a, _hook=hook, _original=original, **k: _hook(_original, *a, **k))
            setattr(owner, name, wrapped)
        cls.hooks.clear()
