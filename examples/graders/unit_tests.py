"""Share of the row's tests that the answer's code passes.

    row     {"messages": [...], "tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}
    score   0 to 1; an answer without code, or with code that does not run, scores 0

The code is the last fenced block of the answer, else all of it. It runs inside the grader's own sandbox, so it can
reach nothing; but it shares a process with the tests, so look at what your policy writes: code that tampers with
`assert` is a way to cheat. Code or a test that runs for more than two seconds has failed. (A single operation that
never lets go, as 10**10**10, is ended by the sandbox, and the answer is then left ungraded.)
"""

import re
import threading

SECONDS = 2.0


def grade(sample, item):
    text = sample["output_text"]
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, flags=re.DOTALL)
    names = {"__name__": "answer"}
    if not runs(blocks[-1] if blocks else text, names):
        print("the code does not run")
        return 0.0
    passed = 0
    for test in item["tests"]:
        if runs(test, names):
            passed += 1
        else:
            print("failed:", test)
    return passed / len(item["tests"])


def runs(source, names):
    """Return whether the code ends in time and without an exception."""
    outcome = []

    def work():
        try:
            exec(compile(source, "answer.py", "exec"), names)
            outcome.append(True)
        except BaseException as cause:  # SystemExit, too: leaving is not passing
            print(f"{type(cause).__name__}: {cause}"[:500])

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return bool(outcome)
