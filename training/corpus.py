"""Prompts about Python's standard library, made from its own source: the tiny recipe's text.

No download, no personal data: lines that carry addresses, names or licence notices are dropped.
The order is a fixed permutation, so a Python version always gives the same prompts.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}
_PERSONAL = re.compile(r"@\w|copyright|authors?\b|licen[sc]e|https?://|written by", re.IGNORECASE)
_MAX_SIGNATURE = 120


def stdlib_prompts(limit: int | None = None, seed: int = 0) -> list[str]:
    """Distinct prompts in a fixed random order, at most `limit` of them."""
    prompts = sorted(set(_all_prompts()))
    random.Random(seed).shuffle(prompts)
    return prompts[:limit]


def _all_prompts() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if _SKIPPED.intersection(parts) or parts[0].startswith("config-"):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for prompt in _module_prompts(module, tree):
            if not _PERSONAL.search(prompt):
                yield prompt


def _module_prompts(module: str, tree: ast.Module) -> Iterator[str]:
    if ast.get_docstring(tree):
        yield f"What is the Python module `{module}` for?"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            signature = _signature(node)
            summary = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip()
            if summary:
                yield f"What does `{module}.{node.name}` do?"
            if signature and summary and len(summary) < _MAX_SIGNATURE:
                yield f"Write a Python function `{signature}`. {summary}"
            elif signature:
                yield f"Write the function `{signature}` from the module `{module}`."
        elif isinstance(node, ast.ClassDef):
            if ast.get_docstring(node):
                yield f"What is the class `{module}.{node.name}`?"
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and (signature := _signature(method)):
                    yield f"Write the method `{signature}` of `{node.name}`."


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    text = f"{node.name}({ast.unparse(node.args)})"
    return text if len(text) <= _MAX_SIGNATURE else None
