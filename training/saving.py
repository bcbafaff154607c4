"""Writing results so that a failed or killed write leaves what was there before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """A temporary path beside `final` (file or folder) that replaces it when the block succeeds.

    Raises OSError, one line, when writing fails (torch and safetensors report a full disk as errors
    of their own); the temporary is then removed and `final` is as it was. A folder is swapped in
    two renames: after a kill between them the next call puts the old one back.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _restore(final)
    temporary = final.with_name(f".{final.name}.tmp")
    _remove(temporary)
    try:
        yield temporary
    except (OSError, RuntimeError, SafetensorError) as error:
        _remove(temporary)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OSError(
            f"{final}: cannot be written ({reason}); free space and run again: what was there "
            "before is unchanged"
        ) from error
    except BaseException:
        _remove(temporary)
        raise
    _swap(temporary, final)


def _swap(temporary: Path, final: Path) -> None:
    if not final.is_dir():
        os.replace(temporary, final)
        return
    old = _aside(final)
    _remove(old)
    os.replace(final, old)
    try:
        os.replace(temporary, final)
    except BaseException:
        _restore(final)
        raise
    _remove(old)


def _restore(final: Path) -> None:
    if not final.exists() and _aside(final).exists():
        os.replace(_aside(final), final)


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
