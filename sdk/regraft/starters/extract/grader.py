import json


def grade(sample, item):
    try:
        answer = json.loads(sample["output_text"])
    except json.JSONDecodeError as cause:
        print("not JSON:", cause)
        return 0.0
    if not isinstance(answer, dict):
        print("not an object")
        return 0.0
    score = 0.2
    for key in ("component", "severity"):
        if answer.get(key) == item[key]:
            score += 0.4
        else:
            print(key, "is", answer.get(key), "and should be", item[key])
    return score
