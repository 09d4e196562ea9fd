"""Guide "Graders", python graders: the working example, the packages and the limits that it names."""

import inspect
import os
import re
from collections.abc import Mapping
from typing import Any

import pytest
import requests

from graders.types import Sample
from tests.conformance.helpers import GRADER_RUN, assert_documented, flags

FUZZY = """
from rapidfuzz import fuzz, utils

def grade(sample, item) -> float:
    said = sample["output_text"]
    wanted = item["reference_answer"]
    return fuzz.WRatio(said, wanted, processor=utils.default_process) / 100.0
"""
# The third-party packages of image 2025-05-08, by the names that they are imported under.
PACKAGES = {
    "numpy": "numpy.mean([1.0])",
    "scipy": "scipy.stats.norm.cdf(9.0)",
    "sympy": "float(sympy.sympify('1'))",
    "pandas": "pandas.Series([1.0]).mean()",
    "rapidfuzz": "rapidfuzz.fuzz.ratio('a', 'a') / 100",
    "sklearn": "sklearn.metrics.accuracy_score([1], [1])",
    "rouge_score": "rouge_score.rouge_scorer.RougeScorer(['rouge1']).score('a b', 'a b')['rouge1'].fmeasure",
    "deepdiff": "float(not deepdiff.DeepDiff({'a': 1}, {'a': 1}))",
    "jsonschema": "float(jsonschema.validate(1, {'type': 'integer'}) is None)",
    "pydantic": "pydantic.TypeAdapter(float).validate_python('1')",
    "yaml": "yaml.safe_load('1.0')",
    "nltk": "nltk.translate.gleu_score.sentence_gleu([['a', 'b']], ['a', 'b'])",
    "sqlparse": "float(len(sqlparse.parse('select 1')))",
    "rdkit": "float(rdkit.Chem.MolFromSmiles('C').GetNumAtoms())",
    "skbio": "float(str(skbio.DNA('ACGT').reverse_complement()) == 'ACGT')",
    "ast_grep_py": "float(ast_grep_py.SgRoot('a = 1', 'python').root().find(pattern='a = 1') is not None)",
}
SUBMODULES = {
    "scipy": "scipy.stats",
    "rapidfuzz": "rapidfuzz.fuzz",
    "sklearn": "sklearn.metrics",
    "rouge_score": "rouge_score.rouge_scorer",
    "nltk": "nltk.translate.gleu_score",
    "rdkit": "rdkit.Chem",
}


def post(path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/fine_tuning/alpha/graders/{path}"
    response = requests.post(url, json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"].startswith("req_")
    return response.json()


def run(source: str, sample: str = "", item: dict[str, Any] | None = None, **options: "Any") -> Any:
    grader = {"type": "python", "name": "mine", "source": source} | options
    return post("run", {"grader": grader, "item": item or {}, "model_sample": sample})


def test_the_working_example_is_given_a_name() -> None:
    grader = post("validate", {"grader": {"type": "python", "source": FUZZY}})["grader"]

    assert grader.keys() == {"type", "name", "source"}
    assert grader["source"] == FUZZY
    assert re.fullmatch(r"grader-\w{12}", grader["name"])


def test_the_working_example_scores_as_rapidfuzz_does() -> None:
    from rapidfuzz import fuzz, utils

    texts = "the cat sat on the mat", "the cat stood by the door"
    body = {
        "grader": {"type": "python", "source": FUZZY},
        "item": {"reference_answer": texts[1]},
        "model_sample": texts[0],
    }

    answer = post("run", body)

    assert_documented(answer, GRADER_RUN)
    assert not flags(answer)
    assert answer["reward"] == pytest.approx(fuzz.WRatio(*texts, processor=utils.default_process) / 100)


def test_the_smallest_example_runs_in_its_image() -> None:
    grader = {
        "type": "python",
        "source": "def grade(sample, item):\n    return 1.0",
        "image_tag": "2025-05-08",
    }

    validated = post("validate", {"grader": grader})["grader"]
    answer = post("run", {"grader": grader, "model_sample": "x"})

    assert validated.items() >= grader.items()
    assert answer["reward"] == 1.0


def grade(sample: "Sample", item: "Mapping[str, Any]", penalty: float = 0.25) -> float:
    return 1.0 - penalty


def test_the_source_of_a_function_with_a_default_runs() -> None:
    """The tip of the guide, with `inspect`, on a function as the cookbook has it."""
    assert run(inspect.getsource(grade))["reward"] == 0.75


def test_the_sample_has_the_documented_fields() -> None:
    source = (
        "def grade(sample, item):\n"
        "    assert sample['output_text'] == '{\"a\": [1]}'\n"
        "    assert sample['output_json'] == {'a': [1]}\n"
        "    assert sample['output_tools'] == []\n"
        "    assert sample['choices'][0]['message']['content'] == sample['output_text']\n"
        "    assert 'output_audio' in sample\n"
        "    return item['my_key']['deep']\n"
    )

    answer = run(source, sample='{"a": [1]}', item={"my_key": {"deep": 0.5}})

    assert answer["reward"] == 0.5, answer


@pytest.mark.parametrize("package", PACKAGES)
def test_a_documented_package_is_there(package: str) -> None:
    module = SUBMODULES.get(package, package)
    source = f"import {module}\n\ndef grade(sample, item):\n    return {PACKAGES[package]}\n"

    answer = run(source, image_tag="2025-05-08")

    assert answer["reward"] == pytest.approx(1.0), answer["metadata"]["errors"]


def test_scratch_space_is_writable() -> None:
    source = (
        "import tempfile\n\ndef grade(sample, item):\n"
        "    with tempfile.TemporaryFile('w+') as file:\n"
        "        file.write('0.5')\n        file.seek(0)\n        return float(file.read())\n"
    )

    assert run(source)["reward"] == 0.5


def test_there_is_no_network() -> None:
    source = (
        "import socket\n\ndef grade(sample, item):\n"
        "    socket.create_connection(('127.0.0.1', 80), timeout=1)\n    return 1.0\n"
    )

    answer = run(source)

    assert (answer["reward"], flags(answer)) == (0.0, {"python_grader_runtime_error"})


@pytest.mark.parametrize("result", ["'high'", "float('nan')", "None", "1 / 0"])
def test_an_invalid_result_is_a_grade_of_zero(result: str) -> None:
    answer = run(f"def grade(sample, item):\n    return {result}\n")

    assert answer["reward"] == 0.0
    assert flags(answer) == {"python_grader_runtime_error"}
    assert answer["metadata"]["errors"]["python_grader_runtime_error_details"]
