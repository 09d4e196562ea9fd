"""How many examples a property test draws: few in `make test`, many where REGRAFT_THOROUGH is set, as at night."""

import os


def examples(few: int, many: int) -> int:
    return many if "REGRAFT_THOROUGH" in os.environ else few
