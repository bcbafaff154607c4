"""ForeSpark settings on vLLM's engine arguments: `--speculative-config forespark.yaml` and friends.

Settings leave `speculative_config` here: the part vLLM knows stays there as its `dflash` method,
the whole travels in `additional_config["forespark"]` to every process.
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from forespark.config import SETTINGS_ABI, ForeSparkConfig, is_forespark
from forespark.config_io import ConfigError, nearest, read_mapping
from forespark.drafter_config import (
    DrafterFacts,
    TargetFacts,
    check_drafter,
    drafter_facts,
    read_drafter,
)
from forespark.metrics import STATS_KEY
from forespark.patching import Patch
from forespark.scheduler.buckets import uncovered
from forespark.supported import check_combination, fit_batch

logger = logging.getLogger("vllm.forespark")
SETTINGS_KEY = "forespark"


def parse_speculative_config(text: str) -> dict[str, Any] | None:
    """The argparse type of --speculative-config: a YAML path or inline JSON, any method."""
    if text in ("", "None"):
        return None
    try:
        mapping, _ = read_mapping(text)
        if is_forespark(mapping):
            # The path is needed again: the drafter is looked up beside the file.
            return ForeSparkConfig.from_any(text).model_dump(mode="json")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return mapping


def active_config(additional_config: object) -> ForeSparkConfig | None:
    """The ForeSpark settings inside `VllmConfig.additional_config`, or None without any."""
    if not isinstance(additional_config, Mapping) or SETTINGS_KEY not in additional_config:
        return None
    return ForeSparkConfig.from_settings(additional_config[SETTINGS_KEY])


def load_facts(config: ForeSparkConfig) -> DrafterFacts:
    """What the drafter checkpoint says about itself: a local folder, else a hub id."""
    model = config.model
    if model is None:
        raise ConfigError("model: missing; name a drafter checkpoint")
    folder = Path(model).expanduser()
    if folder.is_dir() or folder.is_absolute() or model.startswith(".") or model.count("/") != 1:
        return read_drafter(folder)
    from transformers import PretrainedConfig

    try:
        content, _ = PretrainedConfig.get_config_dict(model, revision=config.revision)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model: {model} is no folder here and cannot be read from the hub ({reason}); "
            "give a drafter checkpoint folder or a reachable hub id"
        ) from None
    return drafter_facts(content, model)


def check_drafter_options(config: ForeSparkConfig) -> None:
    """Raise ConfigError for a cache dtype or attention backend that this vLLM does not have."""
    from vllm.config.cache import CacheDType
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = config.drafter.attention_backend
    for key, value, choices in (
        ("kv_cache_dtype", config.drafter.kv_cache_dtype, list(get_args(CacheDType))),
        (
            "attention_backend",
            backend and backend.upper(),
            ["AUTO", *AttentionBackendEnum.__members__],
        ),
    ):
        if value is not None and value not in choices:
            near = nearest(value, choices)
            works = f"did you mean {near}?" if near else f"use one of {', '.join(choices)}"
            raise ConfigError(f"drafter.{key}: {value!r} is unknown to this vLLM; {works}")


def _take_settings(args: Any) -> ForeSparkConfig | None:
    """The ForeSpark settings of these engine arguments; other YAML becomes a plain dict."""
    value = args.speculative_config
    if value is not None and is_forespark(value):
        return ForeSparkConfig.from_any(value)
    if isinstance(value, str | Path):
        args.speculative_config, _ = read_mapping(value)
    # Engine arguments may be turned into a config twice; the second time finds only the rest.
    return active_config(args.additional_config)


def _accept_yaml(original: Any) -> Any:
    upstream = original.__func__ if isinstance(original, staticmethod) else original

    @functools.wraps(upstream)
    def add_cli_args(parser: Any) -> Any:
        parser = upstream(parser)
        for action in parser._actions:
            if "--speculative-config" in action.option_strings:
                action.type = parse_speculative_config
        return parser

    return staticmethod(add_cli_args)


def _split_settings(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = _take_settings(self)
        if config is None:
            return original(self, *args, **kwargs)
        if config.scheduler.policy != "off":
            check_combination(self)
            check_drafter_options(config)
            facts = load_facts(config)
            tokens = config.num_speculative_tokens or facts.default_tokens
            facts.check_tokens(tokens)
            config = config.with_tokens(tokens)
        from forespark.metrics_collector import stats_file

        self.additional_config = {
            **(self.additional_config or {}),
            SETTINGS_KEY: config.settings(),
            STATS_KEY: stats_file(
                self, config.scheduler.policy, config.num_speculative_tokens or 0
            ),
        }
        self.speculative_config = config.to_vllm()
        vllm_config = original(self, *args, **kwargs)
        if self.speculative_config is not None:
            _check_built(vllm_config, config)
            check_graphs(vllm_config, given_graph_sizes(self))
        return vllm_config

    return create_engine_config


def _check_built(vllm_config: Any, config: ForeSparkConfig) -> None:
    if not vllm_config.use_v2_model_runner:
        raise ValueError(
            "method: forespark needs vLLM's V2 model runner, and this configuration selects V1 "
            "(vLLM's warning above names the feature); turn that feature off"
        )
    if config.drafter.kv_cache_dtype == "auto" and vllm_config.cache_config.cache_dtype != "auto":
        # Left unset, the drafter would inherit the target's quantised cache.
        vllm_config.speculative_config.kv_cache_dtype = "auto"


def given_graph_sizes(args: Any) -> str | None:
    """The key by which these engine arguments choose captured sizes; None if vLLM chooses."""
    for key in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        if getattr(args, key, None) is not None:
            return key
        if getattr(args.compilation_config, key, None) is not None:
            return f"compilation_config.{key}"
    return None


def check_graphs(vllm_config: Any, key: str | None) -> None:
    """Raise ValueError when captured sizes given by `key` do not hold a full batch of drafts.

    vLLM's own choice stays, with a warning. Nothing is checked where no graphs are captured.
    """
    largest = vllm_config.compilation_config.max_cudagraph_capture_size
    if not largest or not vllm_config.compilation_config.cudagraph_capture_sizes:
        return
    line = uncovered(
        largest,
        vllm_config.scheduler_config.max_num_seqs,
        vllm_config.speculative_config.num_speculative_tokens,
    )
    if line is None:
        return
    if key is not None:
        raise ValueError(f"{key}: {line}, or leave it out")
    logger.warning("compilation_config.max_cudagraph_capture_size: %s", line)


def _check_target(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_speculative_config(
        self: Any, target_model_config: Any, *args: Any, **kw: Any
    ) -> Any:
        config = active_config(self.additional_config)
        if config is not None and self.speculative_config is not None:
            target = TargetFacts(
                hidden_size=target_model_config.get_hidden_size(),
                vocab_size=target_model_config.get_vocab_size(),
                num_layers=target_model_config.get_total_num_hidden_layers(),
            )
            check_drafter(load_facts(config), target, config.num_speculative_tokens or 0)
        return original(self, target_model_config, *args, **kw)

    return create_speculative_config


def _make_room(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_defaults(self: Any, *args: Any, **kwargs: Any) -> Any:
        seqs_given = self.max_num_seqs is not None
        tokens_given = self.max_num_batched_tokens is not None
        result = original(self, *args, **kwargs)
        config = active_config(self.additional_config)
        if config is None or config.scheduler.policy == "off" or not self.speculative_config:
            return result
        before = (self.max_num_seqs, self.max_num_batched_tokens)
        tokens = self.speculative_config["num_speculative_tokens"]
        after = fit_batch(*before, tokens, seqs_given=seqs_given, tokens_given=tokens_given)
        if after != before:
            self.max_num_seqs, self.max_num_batched_tokens = after
            logger.info(
                "ForeSpark: max_num_seqs %d -> %d, max_num_batched_tokens %d -> %d (a running "
                "request needs 2K + 1 = %d tokens); set both to choose yourself",
                before[0], after[0], before[1], after[1], 2 * tokens + 1,
            )  # fmt: skip
        return result

    return set_defaults


def _hash_without_knobs(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def compute_hash(self: Any) -> str:
        extra = self.additional_config
        if not isinstance(extra, dict) or SETTINGS_KEY not in extra:
            return original(self)
        # Scheduler knobs do not change a compiled graph; only the ABI number is a cache key.
        view = copy.copy(self)
        view.additional_config = {**extra, SETTINGS_KEY: {"abi": SETTINGS_ABI}}
        view.additional_config.pop(STATS_KEY, None)
        return original(view)

    return compute_hash


def engine_args_patches() -> list[Patch]:
    """The patches of this module, in order of application."""
    arguments = "vllm.engine.arg_utils:EngineArgs"
    return [
        Patch(
            arguments,
            "add_cli_args",
            "--speculative-config takes only JSON; accept a YAML path too",
            wrap=_accept_yaml,
        ),
        Patch(
            arguments,
            "create_engine_config",
            "SpeculativeConfig refuses unknown keys; carry ForeSpark's in additional_config",
            wrap=_split_settings,
        ),
        Patch(
            arguments,
            "create_speculative_config",
            "a drafter of another target fails only in the weight loader; compare sizes first",
            wrap=_check_target,
        ),
        Patch(
            arguments,
            "_set_default_max_num_seqs_and_batched_tokens_args",
            "defaults leave no room for drafts and requests are skipped; make them fit",
            wrap=_make_room,
        ),
        Patch(
            "vllm.config.vllm:VllmConfig",
            "compute_hash",
            "additional_config is a compile-cache key; keep scheduler knobs out of it",
            wrap=_hash_without_knobs,
        ),
    ]


def install_engine_args() -> None:
    """Apply the patches; calling it again does nothing."""
    for patch in engine_args_patches():
        patch.apply()
