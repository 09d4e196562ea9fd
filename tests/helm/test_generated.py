"""What follows from other files is up to date."""

from collections.abc import Iterator
from typing import Any

from helm import generate
from tests.helm.charts import CHART, helm


def test_table_and_schema_are_current() -> None:
    due = [str(path) for path, content in generate.generated().items() if path.read_text() != content]

    assert due == [], "run `make chart-docs`"


def test_every_value_has_its_comment() -> None:
    """A key without one has keys below it that do."""
    import yaml

    text = (CHART / "values.yaml").read_text()
    documented = {tuple(path) for path, _ in generate.documented(text.splitlines())}

    def missing(values: dict[str, Any], path: tuple[Any, ...] = ()) -> Iterator[Any]:
        for key, value in values.items():
            here = (*path, key)
            if here in documented:
                continue
            if isinstance(value, dict) and value:
                yield from missing(value, here)
            else:
                yield here

    assert list(missing(yaml.safe_load(text))) == []
    assert len(documented) > 50


def test_the_chart_and_the_service_have_one_version() -> None:
    import tomllib

    project = tomllib.loads((generate.ROOT / "pyproject.toml").read_text())["project"]

    assert helm.Chart.load(CHART).metadata["appVersion"] == project["version"]
