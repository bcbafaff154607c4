"""A small tool for replacing attributes of other people's modules and classes.

Every replacement is a `Patch`: it names the owner, the attribute, the replacement and, in one
line, the upstream behaviour it changes. Applying the same patch again does nothing; applying a
different patch to an attribute that is already patched is an error, because the second would
silently win.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

MISSING = object()
"""Stands for the original of an attribute that did not exist upstream (`create=True`)."""

Owner = ModuleType | type | object | str


class PatchConflictError(RuntimeError):
    """Two different patches were asked for the same attribute."""


@dataclass(frozen=True)
class Patch:
    """One attribute of one owner, and what it becomes.

    owner        module, class or object, or the dotted import path "package.module[:Class]"
    attribute    the name on the owner
    reason       the upstream behaviour that changes, in one line
    replacement  the new value; exactly one of `replacement` and `wrap` is given
    wrap         called with the original, returns the new value
    create       the attribute is new upstream (otherwise its absence is an error)
    """

    owner: Owner
    attribute: str
    reason: str
    replacement: Any = MISSING
    wrap: Callable[[Any], Any] | None = None
    create: bool = False

    def __post_init__(self) -> None:
        if (self.replacement is MISSING) == (self.wrap is None):
            raise ValueError(f"{self.name}: give exactly one of replacement and wrap")
        if not self.reason:
            raise ValueError(f"{self.name}: a patch states the upstream behaviour it changes")

    @property
    def name(self) -> str:
        """Dotted name of the patched attribute, for messages and listings."""
        if isinstance(self.owner, str):
            return f"{self.owner.replace(':', '.')}.{self.attribute}"
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.attribute}"
        return f"{getattr(self.owner, '__name__', repr(self.owner))}.{self.attribute}"

    def apply(self) -> bool:
        """Apply once; False when this very patch is already in place."""
        owner = resolve_owner(self.owner)
        key = (id(owner), self.attribute)
        active = _active.get(key)
        if active is not None:
            if active.patch.same_as(self):
                return False
            raise PatchConflictError(
                f"{self.name} is already patched ({active.patch.reason}); refused: {self.reason}"
            )
        original = inspect.getattr_static(owner, self.attribute, MISSING)
        inherited = self.attribute not in vars(owner)
        if original is MISSING and not self.create:
            raise AttributeError(f"{self.name} does not exist upstream; needed to: {self.reason}")
        value = self.replacement if self.wrap is None else self.wrap(original)
        setattr(owner, self.attribute, value)
        _active[key] = AppliedPatch(self, owner, MISSING if inherited else original)
        return True

    def same_as(self, other: Patch) -> bool:
        """Whether the other patch would install the same thing in the same place."""
        same_value = self.replacement is other.replacement or self.replacement == other.replacement
        return self.attribute == other.attribute and same_value and self.wrap is other.wrap


@dataclass(frozen=True)
class AppliedPatch:
    """A patch in force, with what it replaced (MISSING when the owner did not define it itself)."""

    patch: Patch
    owner: Any
    original: Any


_active: dict[tuple[int, str], AppliedPatch] = {}


def resolve_owner(owner: Owner) -> Any:
    """Turn "package.module[:Class]" into the object it names; anything else is returned as is."""
    if not isinstance(owner, str):
        return owner
    module_name, _, class_name = owner.partition(":")
    module = importlib.import_module(module_name)
    return getattr(module, class_name) if class_name else module


def applied_patches() -> list[AppliedPatch]:
    """Every patch in force, in the order of application."""
    return list(_active.values())


def original(owner: Owner, attribute: str) -> Any:
    """The upstream value behind a patched attribute; the current one when it is not patched."""
    target = resolve_owner(owner)
    active = _active.get((id(target), attribute))
    return getattr(target, attribute) if active is None else active.original


def undo(owner: Owner, attribute: str) -> bool:
    """Put the upstream attribute back (for tests); False when it is not patched."""
    target = resolve_owner(owner)
    active = _active.pop((id(target), attribute), None)
    if active is None:
        return False
    if active.original is MISSING:
        delattr(target, attribute)
    else:
        setattr(target, attribute, active.original)
    return True
