"""The one line that every benchmark ends with."""

import json


def report(name: str, figures: dict[str, float]) -> None:
    print(json.dumps({"bench": name, "figures": {key: round(value, 6) for key, value in figures.items()}}))
