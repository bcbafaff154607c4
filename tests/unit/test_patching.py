"""The patch tool: applied once, conflicts refused, upstream reachable and restorable."""

from __future__ import annotations

import types

import pytest

from forespark.patching import Patch, PatchConflictError, applied_patches, original, undo


@pytest.fixture
def owner():
    module = types.ModuleType("upstream")
    module.answer = lambda: 1
    yield module
    for attribute in ("answer", "extra"):
        undo(module, attribute)


def test_same_patch_twice_is_a_no_op(owner):
    """Catches a plugin loaded twice wrapping its own wrapper."""

    def wrap(upstream):
        return lambda: upstream() + 1

    assert Patch(owner, "answer", "adds one", wrap=wrap).apply()
    assert not Patch(owner, "answer", "adds one", wrap=wrap).apply()
    assert owner.answer() == 2


def test_two_different_patches_of_one_attribute_conflict(owner):
    """Catches the second of two patches silently winning."""
    Patch(owner, "answer", "first", replacement=2).apply()
    with pytest.raises(PatchConflictError, match="first"):
        Patch(owner, "answer", "second", replacement=3).apply()
    assert owner.answer == 2


def test_a_vanished_upstream_attribute_is_an_error(owner):
    """Catches a patch that does nothing after an upstream rename."""
    with pytest.raises(AttributeError, match="extra"):
        Patch(owner, "extra", "not there", replacement=1).apply()
    assert Patch(owner, "extra", "added", replacement=1, create=True).apply()


def test_original_and_undo_restore_upstream(owner):
    """Catches tests leaking patches into each other."""
    upstream = owner.answer
    patch = Patch(owner, "answer", "replaced", replacement=7)
    patch.apply()
    assert original(owner, "answer") is upstream
    assert any(entry.patch is patch for entry in applied_patches())
    assert undo(owner, "answer") and owner.answer is upstream
    assert not undo(owner, "answer")


def test_an_inherited_attribute_is_shadowed_and_unshadowed():
    """Catches an undo that freezes an inherited method onto the subclass."""

    class Base:
        @classmethod
        def name(cls):
            return cls.__name__

    class Derived(Base):
        pass

    def wrap(upstream):
        return classmethod(lambda cls: upstream.__func__(cls).lower())

    Patch(Derived, "name", "lower case", wrap=wrap).apply()
    assert (Derived.name(), Base.name()) == ("derived", "Base")
    undo(Derived, "name")
    assert Derived.name() == "Derived" and "name" not in vars(Derived)


def test_a_patch_gives_one_value_and_a_reason(owner):
    """Catches records nobody could explain."""
    with pytest.raises(ValueError, match="exactly one"):
        Patch(owner, "answer", "both", replacement=1, wrap=lambda f: f)
    with pytest.raises(ValueError, match="upstream behaviour"):
        Patch(owner, "answer", "", replacement=1)
