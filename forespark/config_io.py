"""Reading, explaining and printing a settings schema: YAML, inline JSON, one-line errors.

Generic over pydantic models; the schema itself is `forespark/config.py`.
"""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

YAML_SUFFIXES = (".yaml", ".yml")
COMMENT_WIDTH = 88


class ConfigError(ValueError):
    """A setting that cannot be used: key, value, reason and what works, one line each."""


def read_mapping(value: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Settings as a dict, and the folder of the file they came from (None when not a file).

    `value` is a YAML file, inline JSON text, or already a mapping.
    """
    if isinstance(value, Mapping):
        return dict(value), None
    text = str(value).strip()
    if isinstance(value, str) and text.startswith("{"):
        try:
            return _as_mapping(json.loads(text), "inline JSON"), None
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"inline JSON: {error.msg} at character {error.pos}; "
                'give {"method": "forespark", ...} or the path of a YAML file'
            ) from None
    path = Path(text).expanduser()
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(
            f"{text}: {reason}; give the path of a YAML file or inline JSON"
        ) from None
    try:
        loaded = yaml.safe_load(content)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: is not valid YAML ({reason})") from None
    return _as_mapping(loaded, str(path)), path.resolve().parent


def _as_mapping(loaded: object, where: str) -> dict[str, Any]:
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{where}: holds {type(loaded).__name__}, not keys and values; "
            "start from `forespark config`"
        )
    return {str(key): item for key, item in loaded.items()}


def existing_path(value: str, folder: Path | None) -> str:
    """A relative path resolved against `folder`, then the working directory; else unchanged."""
    given = Path(value).expanduser()
    if given.is_absolute():
        return str(given)
    for base in (folder, Path.cwd()):
        if base is not None and (base / given).exists():
            return str((base / given).resolve())
    return value


def nearest(word: str, known: list[str]) -> str | None:
    """The known dotted key most like `word`, also when only its last part is alike."""
    last_parts = [key.rsplit(".", 1)[-1] for key in known]
    tail = word.rsplit(".", 1)[-1]
    if tail in last_parts:
        return known[last_parts.index(tail)]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    close = difflib.get_close_matches(tail, last_parts, n=1, cutoff=0.6)
    return known[last_parts.index(close[0])] if close else None


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The nested schema of a field, or None when the field is a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def dotted_keys(schema: type[BaseModel]) -> list[str]:
    """Every key that can be set, sections as `section.key`."""
    keys = []
    for name, field in schema.model_fields.items():
        section = section_of(field)
        if section is None:
            keys.append(name)
        else:
            keys += [f"{name}.{key}" for key in section.model_fields]
    return keys


def explain(
    error: ValidationError, schema: type[BaseModel], elsewhere: Mapping[str, str]
) -> ConfigError:
    """Pydantic's findings, one line each; `elsewhere` says what replaces keys we refuse."""
    return ConfigError("\n".join(_explain_one(item, schema, elsewhere) for item in error.errors()))


def _explain_one(item: ErrorDetails, schema: type[BaseModel], elsewhere: Mapping[str, str]) -> str:
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    got = f"{item['input']!r} ({type(item['input']).__name__})"
    if item["type"] == "extra_forbidden":
        advice = elsewhere.get(path[-1])
        if advice is not None:
            return f"{key}: {item['input']!r} cannot be set here; {advice}"
        known = dotted_keys(schema)
        near = nearest(key, known)
        hint = f"did you mean {near}?" if near else f"known keys: {', '.join(known)}"
        return f"{key}: {item['input']!r} is not a known key; {hint}"
    if item["type"] == "missing":
        return f"{key}: missing; see `forespark config` for every key"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{key}.{message}" if key else message
    if item["type"] in ("model_type", "model_attributes_type"):
        message = "give keys and values below it"
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        near = nearest(item["input"], _choices(schema, path))
        message += f"; did you mean {near!r}?" if near else ""
    return f"{key}: got {got}; {message[:1].lower()}{message[1:]}"


def _choices(schema: type[BaseModel], path: list[str]) -> list[str]:
    current: type[BaseModel] | None = schema
    field: FieldInfo | None = None
    for part in path:
        if current is None or part not in current.model_fields:
            return []
        field = current.model_fields[part]
        current = section_of(field)
    return [str(choice) for choice in get_args(field.annotation)] if field is not None else []


def reference_lines(schema: type[BaseModel], examples: Mapping[str, str]) -> Iterator[str]:
    """Commented YAML of every key with its default; `examples` fills keys without one."""
    yield from _fields(schema, examples, indent="")


def _fields(schema: type[BaseModel], examples: Mapping[str, str], indent: str) -> Iterator[str]:
    for name, field in schema.model_fields.items():
        section = section_of(field)
        description = field.description or ""
        if not indent:
            yield ""
        for line in textwrap.wrap(description, COMMENT_WIDTH - len(indent)):
            yield f"{indent}# {line}"
        if section is not None:
            yield f"{indent}{name}:"
            yield from _fields(section, examples, indent + "  ")
        else:
            default = examples.get(name, json.dumps(field.get_default(call_default_factory=True)))
            yield f"{indent}{name}: {default}"
