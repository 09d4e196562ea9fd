"""Tests replace whole parts by fakes, and look at what is public. They patch nothing."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# What a process is given from outside, and what it finds installed: tests set these as they set its environment.
INPUTS = {"sys.argv", "sys.stdin", "sys.stderr", "tempfile.tempdir", "sys.modules"}
# Fields whose value is a function; none of them is a method.
FIELDS = {"stop_requested", "before_step", "answer"}
# Names that begin with an underscore and are documented by the library they belong to.
DOCUMENTED = {"_exit", "_mapping", "_repr_html_", "_request_id"}

NO_GPU = "stands in for a GPU, which the machine that runs the tests does not have"
BROKEN_LIBRARY = "a fault in another project's library, which offers no other place to put one"
RACE = "something that happens in the middle of one call of the standard library"
SLOW = "one engine takes seconds to start, so a whole file shares it"
CONTROL = "a mistake in our own code, which a comparison must see"
INTERNALS = "checks our code against the internals of another library"

ALLOWED = {
    ("worker/test_json_schema.py", "monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)"): NO_GPU,
    (
        "graders/test_contract.py",
        "monkeypatch.setattr(ZygoteProcess, 'grade', broken)",
    ): "a fault of the sandbox itself",
    ("sdk/test_tables.py", "monkeypatch.setattr(datasets, 'load_dataset', fake.load_dataset)"): (
        "stands in for the hub, which tests cannot reach"
    ),
    ("graders/test_folders.py", "monkeypatch.setattr('fcntl.flock', refuse)"): (
        "stands in for a filesystem without locks"
    ),
    (
        "graders/test_spec.py",
        "monkeypatch.setattr(complaints, 'first_of', counted)",
    ): "counts work that no result shows",
    ("worker/test_one_shot.py", "monkeypatch.setattr(service, 'serve_group', serve_group)"): (
        "the ranks of a member, which load torch"
    ),
    ("worker/unforkable.py", "os.fork = _fail"): "a machine without a free process",
    ("worker/test_cli.py", "parser._actions"): "argparse has no public list of its commands",
    ("sdk/test_choices.py", "parser._actions"): "argparse lists its options nowhere else",
    ("sdk/test_choices.py", "argparse._SubParsersAction"): "argparse lists its commands nowhere else",
    ("sdk/test_foreign_servers.py", "monkeypatch.setattr('time.sleep', lambda seconds: None)"): (
        "the command line waits before it connects again"
    ),
    ("worker/eventful_child.py", "torch._C"): NO_GPU,
    ("worker/eventful_child.py", "sharding.place = noted"): NO_GPU,
    ("worker/eventful_child.py", "sizing.degrees_of = all_of_them"): NO_GPU,
    ("worker/test_adapters.py", "monkeypatch.setattr('core.set_aside.shutil.rmtree', remove)"): RACE,
    (
        "worker/test_adapters.py",
        "monkeypatch.setattr('worker.serving.adapters.os.utime', removed_first)",
    ): RACE,
    (
        "worker/test_capacity.py",
        "monkeypatch.setattr('torch.cuda.mem_get_info', lambda: (20 * GIB, 24 * GIB))",
    ): NO_GPU,
    ("worker/test_blocks.py", "monkeypatch.setattr(attention, 'flex_attention', dense_flex)"): NO_GPU,
    ("worker/test_blocks.py", "monkeypatch.setattr(attention, 'flex_attention', compiled)"): NO_GPU,
    ("worker/test_lowering.py", "monkeypatch.setattr(memory, 'release_unused', released.append)"): NO_GPU,
    ("worker/test_losses.py", "trainer._compute_loss"): INTERNALS,
    ("worker/test_trl.py", "trl._compute_loss"): INTERNALS,
    ("worker/test_trl.py", "trl._compute_kl_logps"): INTERNALS,
    (
        "worker/test_refusals.py",
        "monkeypatch.setattr(LlamaForCausalLM, 'from_pretrained', fails)",
    ): BROKEN_LIBRARY,
    (
        "worker/test_refusals.py",
        "monkeypatch.setattr(policy.AutoConfig, 'from_pretrained', fails)",
    ): BROKEN_LIBRARY,
    ("worker/test_refusals.py", "monkeypatch.setattr('graders.build.refusal', busy)"): (
        "a machine without a free process"
    ),
    ("worker/test_exporter_threads.py", "monkeypatch.setattr(threads, '_LEFT_BEHIND', [])"): (
        "a state of the process, which a test must not leave to the next"
    ),
    ("worker/test_compatibility.py", "policy.model.get_base_model().config._attn_implementation"): INTERNALS,
    ("worker/test_compatibility.py", "layer.forward = lambda x: right(x) * 1.01"): BROKEN_LIBRARY,
    ("worker/test_compatibility.py", "policy.layers[0].forward = broken"): BROKEN_LIBRARY,
    ("worker/test_compatibility.py", "policy.layers[0].forward = greedy"): BROKEN_LIBRARY,
    ("worker/test_compatibility.py", "base.model.forward = shifted"): BROKEN_LIBRARY,
    ("worker/test_compatibility.py", "mixture.get_text_config = lambda: mixture"): BROKEN_LIBRARY,
    ("worker/test_sweep.py", "monkeypatch.setattr(service, 'prepare', lambda settings: None)"): (
        "the tables of the bench are made without migrations, which takes a second less a test"
    ),
    (
        "worker/test_updates.py",
        "monkeypatch.setattr('worker.training.policy_loss.tensors_of', shifted)",
    ): CONTROL,
    (
        "worker/test_vllm_sampler.py",
        "monkeypatch.setattr(sampler.engines, 'on_restart', reasons.append)",
    ): SLOW,
    ("worker/test_vllm_sampler.py", "monkeypatch.setattr(sampler, 'policy', attention)"): SLOW,
    (
        "worker/test_vllm_sampler.py",
        "monkeypatch.setattr(sampler.weights, 'namespace', lambda published: 'mem://same')",
    ): CONTROL,
    ("worker/test_vllm_sampler.py", "monkeypatch.setattr(engines_of(sampler)[0], 'silence', 5)"): SLOW,
    ("worker/test_vllm_sampler.py", "monkeypatch.setattr(policy, 'source', tmp_path)"): SLOW,
    ("worker/vllm_contract.py", "LoRAModelManager._create_lora_modules"): INTERNALS,
    ("worker/vllm_contract.py", "LoRAModelManager._register_packed_modules"): INTERNALS,
    ("worker/vllm_contract.py", "_gen_lora_extra_hash_keys"): INTERNALS,
    ("worker/vllm_contract.py", "unquantized._trtllm_bf16_lora_supported"): INTERNALS,
    ("worker/test_head.py", "(storage := one.untyped_storage())._cdata"): "which tensors share memory",
    ("worker/test_head.py", "one.untyped_storage()._cdata"): "which tensors share memory",
    ("worker/test_head.py", "storage._cdata"): "which tensors share memory",
    ("worker/test_head.py", "soft_targets._Chunk"): "whose memory the plan counts",
    ("own_engines.py", "sampler._thread"): "the thread whose event loop an engine's client belongs to",
    ("worker/vllm_contract.py", "punica._token_lora_indices"): INTERNALS,
}


def patches(tree: ast.AST) -> Iterator[str]:
    """What a file replaces behind the back of the code under test, and what it reads that is private."""
    functions = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[target, *more]):
                if what(target, more) not in INPUTS:
                    yield ast.unparse(node)
            case ast.ImportFrom(module=module, names=names):
                yield from (name.name for name in names if is_private(name.name))
                if module == "unittest" or str(module).startswith("unittest.mock"):
                    yield ast.unparse(node)
            case ast.Attribute(value=owner, attr=name) if is_private(name) and not is_own(owner):
                yield ast.unparse(node)
            case ast.Assign(targets=targets, value=value):
                yield from (
                    f"{ast.unparse(t)} = {ast.unparse(v)}"
                    for t, v in pairs(targets, value)
                    if replaces(t, v, functions)
                )


def what(target: ast.expr, more: list[ast.expr]) -> str:
    """The dotted name of what `monkeypatch.setattr` is told to replace."""
    parts = [target, *more[:-1]]
    return ".".join(
        str(part.value) if isinstance(part, ast.Constant) else ast.unparse(part) for part in parts
    )


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in DOCUMENTED


def is_own(owner: ast.expr) -> bool:
    return ast.unparse(owner) in ("self", "cls", "super()")


def pairs(targets: list[ast.expr], value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in targets:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=False)
        else:
            yield target, value


def replaces(target: ast.expr, value: ast.expr, functions: set[str]) -> bool:
    if not isinstance(target, ast.Attribute) or is_own(target.value) or target.attr in FIELDS:
        return False
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)


@cache
def found() -> set[tuple[str, str]]:
    return {
        (str(file.relative_to(TESTS)), patch)
        for file in TESTS.rglob("*.py")
        for patch in patches(ast.parse(file.read_text()))
    }


@pytest.mark.slow
def test_no_test_patches_a_part_or_reads_what_is_private() -> None:
    assert not found() - ALLOWED.keys()


def test_every_exception_is_still_needed() -> None:
    assert not ALLOWED.keys() - found()


def lost_ports(tree: ast.AST) -> Iterator[str]:
    """Sockets that are closed as soon as their port is known: another process may take it (`reserve_port`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and "socket." in ast.unparse(node.items[0].context_expr):
            *before, last = map(ast.unparse, node.body)
            if "getsockname" in last and all(".bind(" in line for line in before):
                yield ast.unparse(node)


@pytest.mark.slow
def test_no_port_is_found_and_closed_before_a_server_listens_on_it() -> None:
    assert [found for file in TESTS.rglob("*.py") for found in lost_ports(ast.parse(file.read_text()))] == []


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("s.bind(('', 0)); port = s.getsockname()[1]", True),
        ("port = s.getsockname()[1]", True),
        ("s.bind(('', 0)); connect(s.getsockname()[1]); done()", False),
    ],
)
def test_the_check_sees_a_port_that_is_lost(body: str, seen: bool) -> None:
    assert bool(list(lost_ports(ast.parse(f"with socket.socket() as s: {body}")))) == seen


# A service takes as long to start as hundreds of short tests, so the tests of a file share one. Those that end theirs:
SEVERAL_SERVICES = {
    "e2e/test_openai_client.py": "a job resumes after a restart",
    "e2e/test_pipelines.py": "a pipeline resumes after a kill of its service",
}


def starts(tree: ast.AST) -> int:
    """How often a file calls what starts a service (tests/e2e/conftest.py)."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sum(isinstance(func, ast.Name) and func.id in ("start_server", "launch") for func in calls)


@pytest.mark.slow
def test_a_file_starts_one_service_unless_restarts_are_what_it_tests() -> None:
    several = {
        str(file.relative_to(TESTS))
        for file in TESTS.rglob("test_*.py")
        if starts(ast.parse(file.read_text())) > 1
    }

    assert several == SEVERAL_SERVICES.keys()


def test_the_check_sees_a_second_start() -> None:
    assert (
        starts(ast.parse("server = start_server(a, b)\nother = launch(c, d)\nbrowser = chromium.launch()"))
        == 2
    )


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("monkeypatch.setattr(module, 'MOST', 1)", True),
        ("monkeypatch.setattr('module.MOST', 1)", True),
        ("monkeypatch.setattr('sys.argv', ['x'])", False),
        ("monkeypatch.setattr(sys, 'argv', ['x'])", False),
        ("monkeypatch.setenv('HOME', '/')", False),
        ("from unittest import mock", True),
        ("from core.jobs import _hidden", True),
        ("store._client", True),
        ("self._client", False),
        ("super()._step()", False),
        ("run.step = lambda: None", True),
        ("def crash(): pass\nrun.a, run.step = 1, crash", True),
        ("run.step = 3", False),
        ("run.stop_requested = lambda: True", False),
    ],
)
def test_the_check_sees_a_patch(source: str, seen: bool) -> None:
    assert bool(list(patches(ast.parse(source)))) == seen
