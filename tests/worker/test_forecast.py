"""What a job would need and take on GPUs that are not here, against numbers worked out by hand."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.units import GIB
from tests.present import present
from worker.cli import plan
from worker.cli.parser import UsageError, build
from worker.gpu_ratio import GpuRatio, settings_of
from worker.model import sizing
from worker.model.forecast import (
    GPUS,
    Cluster,
    Forecast,
    NotDivisible,
    StepSize,
    UnknownGpus,
    cluster_of,
    forecast,
)
from worker.model.sizing import DoesNotFit, Shape

DOCUMENT = Path(__file__).parents[2] / "docs/howto/scale-plan.md"
FULL_DOCUMENT = DOCUMENT.with_name("full-parameter.md")
SIZE = StepSize(prompts=8, group=8, prompt=512, completion=2048, answer=1024, rank=16)
COMMON = {"max_position_embeddings": 8192, "tie_word_embeddings": False, "num_key_value_heads": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": {
        **COMMON,
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Qwen 3 32B": {
        **COMMON,
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "head_dim": 128,
    },
    "Llama 3 70B": {
        **COMMON,
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}


def shape(name: str) -> Shape:
    found = sizing.shape_of_config(CONFIGS[name], 2)
    assert found is not None
    return found


def on(name: str, gpus: str, size: StepSize = SIZE, tensor_parallel: int | None = None) -> Forecast:
    return forecast(name, shape(name), size, cluster_of(gpus), tensor_parallel)


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "name"),
    [
        ("H200-141", 1, 1, "H200-141"),
        ("8xH100-80", 1, 8, "H100-80"),
        ("2x8xH100-80", 2, 8, "H100-80"),
    ],
)
def test_gpus_are_written_as_people_write_them(text: str, nodes: int, per_node: int, name: str) -> None:
    assert cluster_of(text) == Cluster(nodes, per_node, name)


@pytest.mark.parametrize("text", ["8xH100", "0xH100-80", "8", "", "3x2x8xH100-80", "8xT4-16"])
def test_unknown_gpus_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(UnknownGpus, match="H200-141"):
        cluster_of(text)


def test_the_seconds_are_those_of_the_formula() -> None:
    """Llama 3 8B on one H100: 8.03 billion parameters, 131,072 bytes of keys and values a token."""
    found = on("Llama 3 8B", "H100-80")
    parameters, cached = 8.03e9, 131_072

    read = (2 * parameters + found.concurrent * (512 + 512) * cached) / (0.6 * 3.35e12)
    waves = -(-64 // found.concurrent)
    assert found.decode_seconds == pytest.approx(waves * 1024 * read, rel=1e-3)
    assert found.prefill_seconds == pytest.approx(2 * parameters * 8 * 512 / (0.4 * 989e12), rel=1e-3)
    assert not found.plan.checkpointed
    assert found.learning_seconds == pytest.approx(
        4 * parameters * (8 * 512 + 64 * 1024) / (0.4 * 989e12), rel=1e-3
    )
    assert found.gathering_seconds == 0
    assert found.seconds == found.decode_seconds + found.prefill_seconds + found.learning_seconds


def test_sharded_weights_are_gathered_in_each_pass_of_each_micro_batch() -> None:
    found = on("Llama 3 70B", "8xH100-80")

    degree, budget = found.plan.degree, found.plan.token_budget
    passes = 3 if found.plan.checkpointed else 2
    assert degree > 1
    layers = 2 * (shape("Llama 3 70B").parameters - 2 * 128_256 * 8192)
    batches = -(-(8 * 512 + 64 * 1024) // (8 * budget))
    assert found.gathering_seconds == pytest.approx(
        batches * passes * layers * (degree - 1) / degree / (0.6 * 450e9)
    )


def test_answers_side_by_side_are_as_many_as_the_cache_holds_and_the_engine_has() -> None:
    short, shared = on("Qwen 3 32B", "H200-141"), on("Llama 3 8B", "8xH200-141", tensor_parallel=1)

    whole = shape("Qwen 3 32B").cache_bytes(SIZE.workload.longest)
    assert short.concurrent == short.plan.cache_bytes // whole < 64
    assert shared.concurrent == 8
    assert short.plan.estimate.total <= GPUS["H200-141"].memory_gib * GIB


def test_a_cache_for_all_that_is_in_flight_holds_all_answers() -> None:
    """They share the blocks of their prompts."""
    found = on("Llama 3 8B", "H100-80")

    assert found.plan.cache_bytes == 8 * (512 + 8 * 2048) * shape("Llama 3 8B").token_cache_bytes
    assert found.concurrent == 64


def test_an_engine_has_whole_groups() -> None:
    """Of 8 groups of 8 answers on 3 engines, one has three."""
    found = forecast(
        "Llama 3 8B", shape("Llama 3 8B"), replace(SIZE, off_policy_steps=1), cluster_of("8xH200-141"), 1, 3
    )

    assert (found.engines, found.answers_of_engine) == (3, 24)


def split(name: str, gpus: str, size: StepSize = SIZE, sampling_gpus: int | None = None) -> Forecast:
    size = replace(size, off_policy_steps=2)
    return forecast(name, shape(name), size, cluster_of(gpus), sampling_gpus=sampling_gpus)


def test_a_split_plan_says_which_gpus_do_what_and_with_which_settings() -> None:
    found = split("Llama 3 8B", "8xH100-80", sampling_gpus=2)
    said = str(found)

    assert (
        "split: sampling on 2 GPUs, 2 steps ahead of learning on 6 (REGRAFT_SAMPLING_GPUS=2 with REGRAFT_RANKS=6)"
        in said
    )
    assert f"To sample {found.sampling_bytes / GIB:.1f} GiB, of which the KV cache is 8.2. To learn" in said
    assert "Adapters of earlier policies take 0.9 GiB of main memory." in said
    sides = f"sampling takes {found.sampling_seconds:.1f} s on 2 GPUs, learning {found.updating_seconds:.1f} s on 6"
    assert f"{found.seconds:.1f}: {sides}, so learning waits. Of these decoding" in said
    measured = GpuRatio(found.sampling_seconds, found.updating_seconds, 2, 6, found.tensor_parallel)
    assert f"{sides}, so learning waits." in measured.message, "as a job that has measured it"
    assert settings_of(2, 6) in said
    assert settings_of(measured.best_sampling_gpus, 8 - measured.best_sampling_gpus) in measured.message


def test_a_colocated_plan_says_so() -> None:
    assert "placement  colocated: sampling on 8 GPUs, then learning on 16\n" in str(
        on("Llama 3 8B", "2x8xH100-80")
    )


def test_gpus_of_other_machines_that_have_no_rank_have_no_work() -> None:
    """Each machine of a group has as many ranks as the first."""
    found = split("Llama 3 8B", "2x8xH100-80", sampling_gpus=3)

    assert (found.ranks, found.learning_gpus) == (5, 10)
    assert "sampling on 3 GPUs, 2 steps ahead of learning on 10" in str(found)
    assert "3 GPUs of other machines without work" in str(found)


@pytest.mark.parametrize(
    ("gpus", "sampling", "parallel", "full", "message"),
    [
        ("H100-80", None, None, False, "Of the 1 GPU of a machine some .* which needs two"),
        ("8xH100-80", 8, None, False, "Of the 8 GPUs .* and 8 are to sample"),
        ("8xH100-80", 0, None, False, "and 0 are to sample"),
        ("8xH100-80", 3, 2, False, "Tensor parallel degree 2 does not divide .* and the 3 GPUs"),
        ("8xH200-141", None, None, True, "off_policy_steps cannot be combined with train 'full'"),
    ],
)
def test_gpus_that_cannot_be_split_are_refused(
    gpus: str, sampling: int | None, parallel: int | None, full: bool, message: str
) -> None:
    size = replace(SIZE, off_policy_steps=1, full=full)

    with pytest.raises(NotDivisible, match=message):
        forecast("Llama 3 8B", shape("Llama 3 8B"), size, cluster_of(gpus), parallel, sampling)


def test_a_model_that_fits_with_no_ratio_is_refused() -> None:
    with pytest.raises(DoesNotFit, match=r"needs .* Nor does another ratio of the GPUs fit\."):
        split("Llama 3 70B", "2xH100-80")


def test_split_is_faster_where_a_gpu_has_too_little_memory_for_both() -> None:
    """docs/howto/scale-plan.md has these numbers."""
    long = replace(SIZE, completion=16_384, answer=8192)

    seconds = [round(made("Qwen 3 32B", "8xH100-80", long).seconds) for made in (split, on)]

    assert "takes {} s split on 8 x H100-80, and {} s colocated".format(*seconds) in DOCUMENT.read_text()
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("Llama 3 8B", "H100-80"),
        ("Qwen 3 32B", "2xH100-80"),
        ("Qwen 3 32B", "H200-141"),
        ("Llama 3 70B", "8xH100-80"),
        ("Llama 3 70B", "8xH200-141"),
        ("Llama 3 70B", "2x8xH100-80"),
    ],
)
def test_what_fits_is_not_refused(name: str, gpus: str) -> None:
    found = on(name, gpus)

    assert found.plan.estimate.total <= found.cluster.gpu.memory_gib * GIB
    assert found.engines * found.tensor_parallel <= found.cluster.per_node
    assert found.cluster.per_node % found.plan.degree == 0


@pytest.mark.parametrize(("name", "gpus"), [("Qwen 3 32B", "H100-80"), ("Llama 3 70B", "2xH200-141")])
def test_what_does_not_fit_is_refused_with_its_numbers(name: str, gpus: str) -> None:
    with pytest.raises(DoesNotFit, match=rf"{name} at 2560 tokens needs \d+"):
        on(name, gpus)


LONG = StepSize(prompts=8, group=8, prompt=1024, completion=15_360, answer=8192, rank=16)


def test_a_vllm_that_has_to_sleep_copies_its_weights_back_from_main_memory() -> None:
    found = on("Llama 3 8B", "L40S-48", LONG)

    assert found.plan.sleeps
    assert found.plan.estimate.total <= 44 * GIB
    assert found.sleeping_seconds == pytest.approx(2 + 2 * 8.03e9 / 25e9, rel=1e-3)
    others = found.decode_seconds + found.prefill_seconds + found.learning_seconds
    assert found.seconds == pytest.approx(others + found.sleeping_seconds)
    assert on("Llama 3 8B", "H100-80").sleeping_seconds == 0


def test_a_vllm_sleeps_where_that_makes_a_step_faster_and_a_plan_leaves_5_percent_free_as_those_of_jobs() -> (
    None
):
    found = on("Llama 3 8B", "H100-80", replace(SIZE, prompts=64, group=16))

    assert found.plan.saved_seconds == pytest.approx(11.0, rel=1e-2)
    assert found.sleeping_seconds == sizing.sleep_seconds(shape("Llama 3 8B"), found.tensor_parallel)
    assert 0.9 * 78 * GIB < found.plan.estimate.total <= 78 * GIB - 78 * GIB // 20


def test_more_machines_learn_faster_and_sample_no_faster() -> None:
    """Only the first machine has engines."""
    one, two = on("Llama 3 8B", "8xH100-80"), on("Llama 3 8B", "2x8xH100-80")

    assert two.learning_seconds == pytest.approx(one.learning_seconds / 2)
    assert two.decode_seconds == one.decode_seconds


def test_of_the_tensor_parallel_degrees_the_fastest_is_taken_unless_one_is_given() -> None:
    fastest = on("Qwen 3 32B", "8xH200-141")
    tried = [on("Qwen 3 32B", "8xH200-141", tensor_parallel=degree) for degree in (1, 2, 4, 8)]

    assert fastest.seconds == min(one.seconds for one in tried)
    assert [one.tensor_parallel for one in tried] == [1, 2, 4, 8]
    with pytest.raises(DoesNotFit, match="tensor parallel degree 3"):
        on("Qwen 3 32B", "8xH200-141", tensor_parallel=3)


def test_the_table_of_the_document_is_what_the_command_computes() -> None:
    rows = re.findall(r"^\| (.+ \d+B)" + 5 * r" \| ([^|]+)" + r" \|$", DOCUMENT.read_text(), re.M)

    assert len(rows) >= 6
    for name, gpus, engines, degree, gib, seconds in rows:
        found = on(name, gpus.replace(" ", ""))
        assert (engines, degree) == (f"{found.engines} x {found.tensor_parallel}", str(found.plan.degree))
        assert (gib, seconds) == (f"{found.plan.estimate.total / GIB:.0f}", f"{found.seconds:.0f}")


def test_the_table_of_split_placement_is_what_the_command_computes() -> None:
    rows = re.findall(r"^\| (.+ \d+B)" + 6 * r" \| ([^|]+)" + r" \|$", DOCUMENT.read_text(), re.M)

    assert len(rows) >= 4
    for name, gpus, sides, engines, degree, gib, seconds in rows:
        found = split(name, gpus.replace(" ", ""))
        assert sides == f"{found.sampling_gpus} + {found.learning_gpus}"
        assert (engines, degree) == (f"{found.engines} x {found.tensor_parallel}", str(found.plan.degree))
        assert gib == f"{found.sampling_bytes / GIB:.0f}, {found.plan.estimate.total / GIB:.0f}"
        assert seconds == f"{found.sampling_seconds:.1f}, {found.updating_seconds:.1f}"
        assert found.seconds > on(name, gpus.replace(" ", "")).seconds, "colocated, as the text below says"


SMALL: dict[str, dict[str, Any]] = {
    "Llama 3.2 1B": {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "Llama 3.2 3B": {
        "vocab_size": 128_256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip


def full_on(name: str, gpus: str, *, has_reference: bool = False) -> Forecast:
    config = SMALL.get(name) or CONFIGS[name]
    size = replace(SIZE, full=True, has_reference=has_reference)
    return forecast(name, present(sizing.shape_of_config(config, 2)), size, cluster_of(gpus))


def test_all_weights_go_to_vllm_in_each_step_and_learn_with_half_as_many_flops_more() -> None:
    found = full_on("Llama 3.2 1B", "H100-80")
    parameters, cached = 1.236e9, 32_768

    assert found.plan.estimate.copies == 2
    assert not found.plan.checkpointed
    waves = -(-64 // found.concurrent)
    read = (2 * parameters + found.concurrent * (512 + 512) * cached) / (0.6 * 3.35e12)
    assert found.decode_seconds == pytest.approx(waves * 1024 * read, rel=1e-3)
    assert found.publishing_seconds == pytest.approx(2 * 2 * parameters / 2e9, rel=1e-3)  # written and read
    assert found.learning_seconds == pytest.approx(
        6 * parameters * (8 * 512 + 64 * 1024) / (0.4 * 989e12), rel=1e-3
    )
    sampling = found.publishing_seconds + found.decode_seconds + found.prefill_seconds
    assert found.seconds == pytest.approx(sampling + found.learning_seconds)
    assert "1 vLLM engine" in str(found) and "weights to vLLM 2.5" in str(found)


def test_an_adapter_is_sent_in_no_time() -> None:
    assert on("Llama 3 8B", "H100-80").publishing_seconds == 0


def test_all_weights_have_vllm_on_each_gpu_and_a_copy_that_is_not_sharded() -> None:
    found = full_on("Llama 3.2 1B", "8xH100-80")

    assert found.engines * found.tensor_parallel == 8
    assert found.plan.degree == 1


def test_an_8b_model_is_trained_in_parts_whose_gradients_are_divided_too() -> None:
    found = full_on("Llama 3 8B", "8xH100-80")

    assert found.plan.degree == 8
    layers, batches = 32 * 218_112_000 + 4096, -(-(8 * 512 + 64 * 1024) // 8 // found.plan.token_budget)
    passes = 3 if found.plan.checkpointed else 2
    moved = batches * layers * (passes * 2 + 4) * 7 / 8
    assert found.gathering_seconds == pytest.approx(moved / (0.6 * 450e9), rel=1e-3)


def test_a_kl_penalty_keeps_a_copy_of_all_weights() -> None:
    without, with_copy = (full_on("Llama 3.2 1B", "H100-80", has_reference=kl) for kl in (False, True))

    assert with_copy.plan.estimate.reference == 2 * 1_235_814_400
    assert without.plan.estimate.reference == 0


@pytest.mark.parametrize(
    ("name", "gpus", "said"),
    [
        ("Llama 3 8B", "2xH100-80", "needs"),
        ("Llama 3 8B", "2x8xH200-141", "train 'full' is for one machine: plan Llama 3 8B on 8xH200-141"),
        ("Qwen 3 32B", "B200-180", "at most 8B parameters, and this one has 32.8B"),
    ],
)
def test_all_weights_that_do_not_fit_are_refused(name: str, gpus: str, said: str) -> None:
    with pytest.raises(DoesNotFit, match=said):
        full_on(name, gpus)


def test_the_table_of_full_parameter_training_is_what_the_command_computes() -> None:
    rows = re.findall(
        r"^\| (Llama.+B) \| (\S+) \| (\S+) \| (\S+) \| (yes|no) \|$", FULL_DOCUMENT.read_text(), re.M
    )

    assert len(rows) >= 4
    for name, gpus, gib, with_kl, checkpointed in rows:
        found = full_on(name, gpus)
        assert gib == f"{found.plan.estimate.total / GIB:.0f}"
        assert with_kl == f"{full_on(name, gpus, has_reference=True).plan.estimate.total / GIB:.0f}"
        assert (checkpointed == "yes") == found.plan.checkpointed


def run(*arguments: str) -> argparse.Namespace:
    return build().parse_args(["plan", *arguments])


def test_the_command_prints_the_forecast_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama 3 70B"]))

    assert plan.main(run(str(tmp_path), "--gpus", "8xH100-80")) == 0
    said = capsys.readouterr().out
    assert "70.6 billion parameters on 8 x H100-80" in said
    assert "not measured on GPUs" in said
    assert "Set `tensor_parallel = " in said

    (tmp_path / "config.json").write_text(json.dumps(SMALL["Llama 3.2 1B"] | {"model_type": "llama"}))
    assert plan.main(run(str(tmp_path), "--gpus", "H100-80", "--train", "full", "--kl")) == 0
    assert "weights 2 x 2.3, buffers 0.4, optimizer 18.4, reference 2.3" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama 3 70B"]))

    assert plan.main(run(str(tmp_path), "--gpus", "8xH100-80", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(
        on("Llama 3 70B", "8xH100-80").seconds
    )


def test_the_command_says_that_vllm_sleeps_and_what_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama 3 8B"]))
    size = ["--prompt", "1024", "--max-completion-tokens", "15360"]

    plan.main(run(str(tmp_path), "--gpus", "L40S-48", *size))
    said = capsys.readouterr().out
    plan.main(run(str(tmp_path), "--gpus", "L40S-48", *size, "--json"))
    data = json.loads(capsys.readouterr().out)

    assert (
        "vLLM sleeps while the job learns, because both do not fit at once; its weights take 30.1 GiB" in said
    )
    assert "while sampling" in said and "vLLM's sleep 2.6" in said
    kept = shape("Llama 3 8B").weight_bytes + sizing.slot_bytes(shape("Llama 3 8B"), 16)
    assert (data["sleeps"], data["main_memory_bytes"]) == (True, 2 * kept)


def test_the_command_plans_split_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama 3 8B"]))
    gpus = (str(tmp_path), "--gpus", "8xH100-80")

    assert plan.main(run(*gpus, "--off-policy-steps", "2")) == 0
    said = capsys.readouterr().out
    assert plan.main(run(*gpus, "--off-policy-steps", "1", "--sampling-gpus", "2", "--json")) == 0
    data = json.loads(capsys.readouterr().out)
    assert plan.main(run(*gpus, "--json")) == 0
    colocated = json.loads(capsys.readouterr().out)

    assert "split: sampling on 4 GPUs, 2 steps ahead of learning on 4" in said
    assert (data["placement"], data["sampling_gpus"], data["ranks"]) == ("split", 2, 6)
    found = split("Llama 3 8B", "8xH100-80", sampling_gpus=2)
    assert (data["off_policy_steps"], data["bytes_per_sampling_gpu"]) == (1, found.sampling_bytes)
    assert data["seconds"] == max(
        data["decode_seconds"] + data["prefill_seconds"], data["learning_seconds"] + data["gathering_seconds"]
    )
    assert (colocated["placement"], colocated["sampling_gpus"], colocated["ranks"]) == ("colocated", 0, 8)
    assert colocated["bytes_per_sampling_gpu"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sampling-gpus", "2"], "add --off-policy-steps"),
        (["--off-policy-steps", "1", "--train", "full"], "cannot be combined with train 'full'"),
        (["--off-policy-steps", "1", "--sampling-gpus", "8"], "and 8 are to sample"),
    ],
)
def test_a_split_that_cannot_be_is_a_mistake_in_the_command(
    tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama 3 8B"]))

    with pytest.raises(UsageError, match=message):
        plan.main(run(str(tmp_path), "--gpus", "8xH100-80", *options))


def test_the_rank_of_an_adapter_is_refused_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama 3 8B"]))

    with pytest.raises(UsageError, match="--lora-rank has no effect with --train full"):
        plan.main(run(str(tmp_path), "--gpus", "8xH100-80", "--train", "full", "--lora-rank", "64"))


def test_a_model_in_a_gguf_file_is_refused_with_the_folder_to_plan_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.gguf").touch()
    registry = tmp_path / "models.toml"
    registry.write_text(f'[models.small]\npath = "{tmp_path / "small.gguf"}"\n')
    monkeypatch.setenv("REGRAFT_MODELS_FILE", str(registry))
    monkeypatch.setenv("REGRAFT_DATA_DIR", str(tmp_path / "data"))

    with pytest.raises(UsageError, match=f"is a GGUF file.* below {tmp_path / 'data' / 'models'}"):
        plan.main(run("small", "--gpus", "H100-80"))


@pytest.mark.parametrize(
    ("model", "gpus", "message"),
    [
        ("nowhere", "H100-80", "neither a model of the registry nor a folder"),
        (".", "H100-80", "not on this machine"),
        ("large", "H100-80", "needs"),
        ("large", "many", "Known kinds"),
    ],
)
def test_what_cannot_be_planned_is_a_mistake_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, gpus: str, message: str
) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(CONFIGS["Llama 3 70B"]))
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match=message):
        plan.main(run(model, "--gpus", gpus))
