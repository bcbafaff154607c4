"""The schema of forespark.yaml: what it accepts, refuses, passes to vLLM and carries to workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from forespark.config import ForeSparkConfig, is_forespark, reference_yaml
from forespark.config_io import ConfigError

DRAFTER = Path(__file__).parents[1] / "assets" / "tiny-pair" / "drafter"


def settings(**changes: Any) -> dict[str, Any]:
    return {"method": "forespark", "model": str(DRAFTER), **changes}


def refusal(value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        ForeSparkConfig.from_any(value)  # type: ignore[arg-type]
    return str(caught.value)


def test_yaml_json_and_dict_mean_the_same(tmp_path: Path) -> None:
    """Catches a loader that treats one of the three ways of configuring differently."""
    given = settings(num_speculative_tokens=5, scheduler={"policy": "full"})
    file = tmp_path / "forespark.yaml"
    file.write_text(yaml.safe_dump(given))
    from_file = ForeSparkConfig.from_any(file)
    assert from_file == ForeSparkConfig.from_any(json.dumps(given))
    assert from_file == ForeSparkConfig.from_any(given) == ForeSparkConfig.from_any(str(file))


def test_drafter_is_looked_up_beside_the_yaml_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches relative drafters resolved against the working directory, and broken hub ids."""
    (tmp_path / "conf" / "org" / "drafter").mkdir(parents=True)
    (tmp_path / "cwd" / "org" / "drafter").mkdir(parents=True)
    (tmp_path / "cwd" / "other").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    file = tmp_path / "conf" / "forespark.yaml"
    for model, expected in (
        ("org/drafter", str(tmp_path / "conf" / "org" / "drafter")),
        ("other", str(tmp_path / "cwd" / "other")),
        ("hub-org/hub-name", "hub-org/hub-name"),
    ):
        file.write_text(f"method: forespark\nmodel: {model}\n")
        assert ForeSparkConfig.from_any(file).model == expected


def test_bare_off_is_the_policy_off(tmp_path: Path) -> None:
    """Catches YAML reading a bare `off` as false and the server refusing a documented value."""
    file = tmp_path / "forespark.yaml"
    file.write_text("method: forespark\nscheduler:\n  policy: off\n")
    config = ForeSparkConfig.from_any(file)
    assert config.scheduler.policy == "off"
    assert config.to_vllm() is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scheduler": {"polcy": "full"}}, ["scheduler.polcy", "'full'", "scheduler.policy"]),
        ({"policy": "full"}, ["policy", "did you mean scheduler.policy"]),
        ({"kv_cache_dtype": "fp8"}, ["did you mean drafter.kv_cache_dtype"]),
        ({"scheduler": {"policy": "jont"}}, ["scheduler.policy", "'jont'", "'joint'"]),
        ({"num_speculative_tokens": "15"}, ["num_speculative_tokens", "'15' (str)", "integer"]),
        ({"num_speculative_tokens": True}, ["num_speculative_tokens", "True (bool)"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens", "0", "greater than"]),
        ({"scheduler": "joint"}, ["scheduler", "'joint' (str)", "keys and values"]),
        ({"scheduler": {"min_gain": float("nan")}}, ["scheduler.min_gain", "nan"]),
        ({"scheduler": {"prior_acceptance": 1.0}}, ["scheduler.prior_acceptance", "less than 1"]),
        ({"enable_adaptive_verification": True}, ["scheduler.policy decides it"]),
        ({"num_speculative_tokens_per_batch_size": []}, ["scheduler.batchwise_schedule"]),
        ({"latency": {"artifact": "no.json"}}, ["latency.artifact", "no.json", "leave it out"]),
        ({"latency": {"profile": "never"}}, ["latency.profile", "'never'", "startup"]),
        ({"rejection_sample_method": "block"}, ["rejection_sample_method", "block", "standard"]),
        ({"observe": {"trace_arrays": True}}, ["observe.trace_arrays", "observe.trace"]),
        ({"model": None}, ["model", "scheduler.policy: off"]),
        (
            {"num_speculative_tokens": 3, "scheduler": {"min_draft_len": 4}},
            ["scheduler.min_draft_len", "4", "0..3"],
        ),
        (
            {"scheduler": {"batchwise_schedule": [[1, 3]]}},
            ["scheduler.batchwise_schedule", "policy: batchwise"],
        ),
        (
            {"scheduler": {"policy": "batchwise", "batchwise_schedule": [[8, 3], [8, 1]]}},
            ["scheduler.batchwise_schedule", "[8, 8]", "ascending"],
        ),
        ({"method": "dflash"}, ["method", "'dflash'", "forespark"]),
    ],
)
def test_a_bad_setting_is_one_line_with_key_value_and_what_works(
    change: dict[str, Any], words: list[str]
) -> None:
    """Catches settings that are silently dropped, and refusals that do not say what to change."""
    message = refusal(settings(**change))
    assert "\n" not in message
    for word in words:
        assert word in message


def test_two_mistakes_are_two_lines() -> None:
    """Catches a report that stops at the first mistake."""
    message = refusal(settings(num_speculative_tokens="x", scheduler={"polcy": 1}))
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize("text", ["missing.yaml", '{"method": "forespark"', "{}"])
def test_unreadable_settings_are_refused_without_a_traceback(text: str) -> None:
    """Catches OSError or a JSON traceback reaching the user."""
    assert "\n" not in refusal(text)


def test_broken_yaml_names_the_file(tmp_path: Path) -> None:
    """Catches a YAML error that does not say which file it is in."""
    file = tmp_path / "broken.yaml"
    file.write_text("method: [forespark\n")
    assert str(file) in refusal(file)
    file.write_text("- forespark\n")
    assert "list" in refusal(file)


def test_omitted_k_is_the_checkpoints_own() -> None:
    """Catches vLLM refusing a DFlash2 drafter because K is only in its config.json."""
    given = ForeSparkConfig.from_any(settings()).to_vllm()
    assert given is not None and given["num_speculative_tokens"] == 7


@pytest.mark.parametrize(
    ("policy", "trims"),
    [("full", False), ("batchwise", True), ("adaptive_verification", True),
     ("single_curve", True), ("joint", True)],
)  # fmt: skip
def test_vllm_sees_dflash_and_only_trimming_policies_trim(policy: str, trims: bool) -> None:
    """Catches `full` being served with trimmed verification, or `joint` without it."""
    given = ForeSparkConfig.from_any(settings(scheduler={"policy": policy})).to_vllm()
    assert given is not None
    assert given["method"] == "dflash"
    assert given["enable_adaptive_verification"] is trims
    assert given["draft_sample_method"] == "probabilistic"
    assert not {"scheduler", "latency", "drafter", "observe"} & given.keys()


def test_the_drafters_cache_dtype_is_its_own_key() -> None:
    """Report 40: catches a drafter that can only inherit the target's quantised cache."""
    plain = ForeSparkConfig.from_any(settings()).to_vllm()
    own = ForeSparkConfig.from_any(settings(drafter={"kv_cache_dtype": "bfloat16"})).to_vllm()
    assert plain is not None and "kv_cache_dtype" not in plain
    assert own is not None and own["kv_cache_dtype"] == "bfloat16"


def test_settings_survive_json() -> None:
    """Catches a value that a worker process would read back differently."""
    config = ForeSparkConfig.from_any(
        settings(scheduler={"policy": "batchwise", "batchwise_schedule": [[4, 7], [64, 2]]})
    )
    carried = json.loads(json.dumps(config.settings()))
    assert ForeSparkConfig.from_settings(carried) == config


def test_default_batchwise_schedule_never_exceeds_k() -> None:
    """Catches a default schedule that drafts more than K, or nothing, for small K."""
    config = ForeSparkConfig.from_any(settings(scheduler={"policy": "batchwise"}))
    for tokens in (1, 2, 7, 15):
        lengths = [length for _, _, length in config.batchwise_ranges(tokens)]
        assert lengths[0] == tokens
        assert all(1 <= length <= tokens for length in lengths)
        assert lengths == sorted(lengths, reverse=True)


def test_batchwise_ranges_have_no_gap_and_no_overlap() -> None:
    """Catches an off-by-one between 'up to n' in the file and the planner's inclusive ranges."""
    pairs = [[4, 7], [64, 2], [65, 0]]
    config = ForeSparkConfig.from_any(
        settings(scheduler={"policy": "batchwise", "batchwise_schedule": pairs})
    )
    assert config.batchwise_ranges(7) == ((1, 4, 7), (5, 64, 2), (65, 65, 0))


def test_reference_is_the_defaults() -> None:
    """Catches a reference page whose values are not what the schema really uses."""
    loaded = yaml.safe_load(reference_yaml())
    assert ForeSparkConfig.from_any(loaded) == ForeSparkConfig.from_any(
        {"method": "forespark", "model": "path-or-hub-id"}
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (settings(), True),
        ({"method": "foresprk", "model": "x"}, True),
        ({"model": "x", "scheduler": {"policy": "joint"}}, True),
        ({"method": "dflash", "model": "x"}, False),
        ({"method": "ngram", "num_speculative_tokens": 3}, False),
        ('{"method": "eagle3", "model": "x"}', False),
        (None, False),
    ],
)
def test_recognises_its_own_settings(value: object, expected: bool) -> None:
    """Catches a misspelt method that vLLM would report without naming forespark."""
    assert is_forespark(value) is expected
