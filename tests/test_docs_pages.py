"""What the pages of docs/ show works: rows are valid, graders give the scores that are written, commands exist."""

import ast
import asyncio
import inspect
import json
import re
import shlex
import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import pytest
from regraft import Regraft
from regraft.cli import parser as client_cli
from regraft.requests import read_pipeline

from api.resources.job_shapes import ProgressOut
from api.resources.pipeline_requests import PipelineCreate, parsed_job
from core.jobs.hyperparameter_groups import Loss
from core.jobs.integrations import KINDS
from core.jobs.pods import PodNote, PodState, waits_for
from core.pipelines import graph
from core.registry import BaseModelEntry
from core.storage.datasets import Example, read_rows
from graders.build import build
from graders.judge.judges import HttpJudges, JudgeModel
from graders.run import grade_all
from graders.spec import GraderSpec, parse_grader
from graders.types import Grade, Sample
from tests.graders.servers import ScriptedServer, verdict
from tests.present import present
from worker.cli import parser as server_cli

GRADER_OF_AN_EXAMPLE = {
    "type": "math",
    "name": "correct",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README_EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
# Of blocks that a shell reads: with a prompt or without, variables before it, comments and redirections after it.
COMMAND = re.compile(
    r"^ *(?:\$ |sudo )?(?:[A-Z_]+=\S+ +)*(?:\S*/bin/)?(regraft(?:-server)? .*?)(?: +[#<>|].*)?$", flags=re.M
)
OTHER_LANGUAGES = {"python", "toml", "yaml", "json", "jsonl", "ini", "diff"}
COMMANDS = [
    (page, command)
    for page, text in PAGES.items()
    if not page.startswith(("reference/", "adr/"))
    for language, block in re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", text, flags=re.M | re.S)
    if language not in OTHER_LANGUAGES
    for command in COMMAND.findall(block)
]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.S)


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_of_the_pages_exist(page: str, command: Any) -> None:
    words = shlex.split(command)
    parser = client_cli.build() if words[0] == "regraft" else server_cli.build()

    try:
        parser.parse_args(words[1:])
    except SystemExit as ended:  # `completion` prints and ends
        assert ended.code == 0, command


def test_commands_are_found_in_tutorials_and_guides() -> None:
    assert {page.split("/")[0] for page, _ in COMMANDS} >= {"tutorial", "howto"}
    assert len(COMMANDS) > 100


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "```jsonl" in text])
def test_rows_of_datasets_are_valid(page: Any) -> None:
    for block in blocks(page, "jsonl"):
        assert all(isinstance(row, Example) for row in read_rows([block.encode()])), block


EXAMPLES = [(page, text) for page in PAGES for text in blocks(page, "python")]


@pytest.mark.parametrize(("page", "text"), [*EXAMPLES, *(("README", text) for text in README_EXAMPLES)])
def test_examples_call_the_client_with_arguments_that_it_has(page: str, text: str) -> None:
    """OpenAI's methods refuse unknown ones, such as extensions of regraft outside of extra_body."""
    client = Regraft(base_url="http://127.0.0.1:1", api_key="k")

    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and (place := re.match(r"client\.([\w.]+)$", ast.unparse(call.func))):
            parameters = inspect.signature(attrgetter(place[1])(client)).parameters
            if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
                assert {keyword.arg for keyword in call.keywords} <= {None, *parameters}, place[1]


@pytest.mark.parametrize(("number", "method", "uploads"), [(0, "supervised", 3), (1, "reinforcement", 2)])
def test_the_pipelines_of_their_page_are_valid(
    tmp_path: Path, number: int, method: str, uploads: int
) -> None:
    (tmp_path / "pipeline.toml").write_text(blocks("howto/pipelines.md", "toml")[number])
    (tmp_path / "grader.json").write_text(json.dumps(GRADER_OF_AN_EXAMPLE))
    for name in ("train", "valid", "prompts"):
        (tmp_path / f"{name}.jsonl").touch()

    asked = read_pipeline(tmp_path / "pipeline.toml")
    body = PipelineCreate.model_validate(asked.with_ids(dict.fromkeys(asked.uploads, "file-1")))

    graph.check([stage.planned() for stage in body.stages])
    assert len(asked.uploads) == uploads
    for stage in body.stages:
        for job in [stage.job] if stage.job is not None else stage.sweep.jobs if stage.sweep else ():
            assert parsed_job(job, stage.name).method.type == method


def test_the_models_file_for_one_gpu_is_valid() -> None:
    [models] = blocks("tutorial/deploy-one-gpu.md", "toml")

    for entry in tomllib.loads(models)["models"].values():
        assert BaseModelEntry.model_validate(entry)


def test_the_tutorials_grader_gives_the_scores_that_its_cases_expect() -> None:
    first, second = blocks("tutorial/own-grader.md", "python")
    cases = [json.loads(line) for line in blocks("tutorial/own-grader.md", "json")[0].splitlines()]

    names: dict[str, Any] = {}
    exec(second, names)
    for case in cases:
        assert names["grade"]({"output_text": case["sample"]}, case) == pytest.approx(case["expect"])
    assert names["grade"]({"output_text": "{}"}, cases[0]) == pytest.approx(0.2)
    exec(first, names)
    assert names["grade"]({"output_text": cases[0]["sample"]}, cases[0]) == 1.0
    with pytest.raises(json.JSONDecodeError):
        names["grade"]({"output_text": cases[2]["sample"]}, cases[2])


TASKS = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGES["howto/cookbook.md"], flags=re.S | re.M)


def test_the_cookbook_has_five_tasks() -> None:
    assert len(TASKS) == 5


@pytest.mark.parametrize(("title", "text"), TASKS)
def test_answers_of_the_cookbook_get_the_scores_that_it_shows(title: str, text: str) -> None:
    [row] = read_rows([present(re.search(r"```jsonl\n(.*?)```", text, flags=re.S))[1].encode()])
    assert isinstance(row, Example)
    spec = parse_grader(json.loads(present(re.search(r"```json\n(.*?)^```", text, flags=re.S | re.M))[1]))
    shown = re.findall(r"^\| `+ ?(\".*\") ?`+ \| (.*) \|$", text, flags=re.M)
    answers = [(json.loads(answer), score) for answer, score in shown]

    async def graded() -> list[Grade]:
        server = ScriptedServer([verdict(0.8)], 1)
        async with server as url, HttpJudges({"my-judge": JudgeModel(f"{url}/v1")}) as judges:
            return await grade_all(build(spec, judges), [(Sample(a), row.item) for a, _ in answers])

    assert answers
    for grade, (answer, score) in zip(asyncio.run(graded()), answers, strict=True):
        assert grade.score is not None, grade.reason
        if score == "below 0.1":
            assert grade.score < 0.1, answer
        else:
            assert grade.score == pytest.approx(float(score)), answer


def features(name: str) -> str:
    """The entry of this name in the list of features, as one line."""
    text = re.sub(r"\s+", " ", PAGES["explain/features.md"])
    return present(re.search(rf"\*\*{name}\*\*: (.*?) - \*\*", text))[1]


def test_the_pages_name_every_grader() -> None:
    types = {get_args(spec.model_fields["type"].annotation)[0] for spec in get_args(get_args(GraderSpec)[0])}

    table = [line.split("|")[1] for line in PAGES["howto/graders.md"].splitlines() if "| alone" in line]
    assert {name for cell in table for name in re.findall(r"`(\w+)`", cell)} == types
    assert types <= set(re.findall(r"`(\w+)`", features("Graders")))


def test_the_pages_name_every_loss() -> None:
    section = PAGES["howto/objective.md"].split("## Losses\n")[1].split("\n## ")[0]
    table = re.findall(r"^\| `(\w+)` \|", section, flags=re.M)
    training = {
        name.upper() for name in re.findall(r"(?:Dr\. )?\b[A-Z]{3,}\b(?:\+\+)?", features("Training"))
    }

    names = {loss.replace("dr_", "dr. ").replace("_plus_plus", "++").upper() for loss in get_args(Loss)}
    assert names <= training
    assert set(get_args(Loss)) <= set(table)


def test_the_page_of_integrations_names_every_exporter() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGES["howto/integrations.md"], flags=re.M)) == set(KINDS)


def test_every_file_of_the_tree_that_a_page_names_exists() -> None:
    named = re.compile(
        r"`((?:api|core|graders|worker|sdk|bench|migrations|helm|docker)/[\w./-]+\.(?:py|sh|yaml|toml))`"
    )
    missing = {
        f"{page.relative_to(ROOT)}: {path}"
        for page in (ROOT / "docs").rglob("*.md")
        for path in named.findall(page.read_text())
        if not (ROOT / path).exists()
    }
    assert missing == set()


def test_every_bench_that_a_page_names_exists() -> None:
    named = [(page, name) for page, text in PAGES.items() for name in re.findall(r"\bbench[./](\w+)", text)]

    assert len(named) > 10
    benches = {path.stem for path in (ROOT / "bench").iterdir()}
    assert [(page, name) for page, name in named if name not in benches] == []


def test_targets_of_make_and_files_that_commands_take_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    shown = {page: text for page, text in PAGES.items() if not page.startswith(("reference/", "adr/"))}
    made = [
        name for text in shown.values() for name in re.findall(r"^(?:\$ )?make ([\w-]+)", text, flags=re.M)
    ]
    files = [
        name
        for text in shown.values()
        for name in re.findall(r" -[fr] ((?:docker|helm|constraints)/[\w./-]+\w)", text)
    ]

    assert len(made) > 5 and len(files) > 5
    assert set(made) <= targets
    assert [name for name in files if not (ROOT / name).exists()] == []


def names_in(file: Path) -> set[str]:
    """All names and attributes that a file uses, and those that it imports."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names


def defined_in(file: Path) -> set[str]:
    """The functions and classes of a file, and the methods of the classes as `Class.method`."""
    tree = ast.parse(file.read_text())
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    names = {node.name for node in tree.body if isinstance(node, functions | ast.ClassDef)}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        names |= {f"{kind.name}.{node.name}" for node in kind.body if isinstance(node, functions)}
    return names


def test_ten_files_lead_from_a_claim_to_a_checkpoint() -> None:
    """Each file of the walk defines its symbol, and a file before it uses that."""
    page = (ROOT / "docs/contribute/index.md").read_text()
    walk = re.findall(r"^\d+\. `(worker/[\w/]+\.py)`, `([\w.]+)`:", page, flags=re.M)

    assert 5 < len(walk) <= 10
    used: set[str] = set()
    for number, (path, symbol) in enumerate(walk):
        assert symbol in defined_in(ROOT / path), path
        assert number == 0 or symbol.split(".")[-1] in used, f"{symbol}: no file before {path} uses it"
        used |= names_in(ROOT / path)


def test_links_of_the_readme_lead_to_files() -> None:
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^):#]+)(?:#[\w-]+)?\)", text)

    assert len(targets) > 20
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_measured_ratio_names_its_bench() -> None:
    """Rows that continue another one name that of the row before."""
    section = (ROOT / "README.md").read_text().split("## Measured\n")[1]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]

    assert len(rows) >= 10
    for row in rows:
        assert re.search(r"\]\(bench/\w+\.py\)", row) or row.startswith("| the same "), row


def constant_texts(file: Path) -> list[str]:
    """The texts of a file as regular expressions: its values may be anything."""
    texts = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".+" for p in node.values]
            texts.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            texts.append(re.escape(node.value))
    return texts


def test_reasons_on_the_page_of_stuck_jobs_are_those_of_the_queue() -> None:
    waits = PAGES["howto/stuck.md"].split("| `validating_files` |")[1].split("| `running` |")[0]
    reasons = re.findall(r"^\|[^|]*\| `([a-z]+ [^`]+)` \|", waits, flags=re.M)
    patterns = [
        text for name in ("fairness", "pods") for text in constant_texts(ROOT / f"core/jobs/{name}.py")
    ]

    assert len(reasons) >= 6
    for reason in reasons:
        assert any(re.fullmatch(pattern, reason) for pattern in patterns), reason


def test_the_page_of_stuck_jobs_names_every_state_of_a_pod_and_every_phase() -> None:
    notes = [PodNote(state, queue="research").to_row(epoch=1) for state in PodState]
    reasons = [waits_for(note, 1, "h200") for note in [None, *notes]]
    phases = get_args(ProgressOut.model_fields["phase"].annotation)

    assert [name for name in (*reasons, *phases) if f"`{name}`" not in PAGES["howto/stuck.md"]] == []


def test_intervals_on_the_page_of_rows_are_those_of_its_formula() -> None:
    rows = re.findall(r"^\| (\d+) \| (0\.\d\d) \|$", PAGES["howto/rows-time-cost.md"], flags=re.M)

    assert len(rows) >= 5
    for number, half in rows:
        assert half == f"{1.96 * 0.5 / int(number) ** 0.5:.2f}"


MAX_WORDS = 2500


@pytest.mark.parametrize(
    "page", [page for page in PAGES if not page.startswith(("reference/", "adr/", "measured/"))]
)
def test_a_page_that_is_read_from_start_to_end_is_short(page: str) -> None:
    """The reference, decisions and measurements are looked up instead."""
    assert len(PAGES[page].split()) <= MAX_WORDS


def test_the_page_on_metrics_names_every_command_that_serves_them() -> None:
    [sentence] = re.findall(
        r"^`REGRAFT_METRICS_PORT=9100` makes (.*?) serve", PAGES["howto/observability.md"], re.M
    )
    sections = PAGES["reference/cli.md"].split("### regraft-server ")[1:]

    assert re.findall(r"`(\w+)`", sentence) == [
        one.split()[0] for one in sections if "`--metrics-port PORT`" in one
    ]
