"""Grade samples with graders built from specs. Depends on no database, web server or torch, so it works standalone.

>>> import asyncio
>>> from graders.build import build
>>> from graders.run import grade_all
>>> from graders.spec import parse_grader
>>> from graders.types import Sample
>>> spec = parse_grader({
...     "type": "string_check", "name": "exact", "operation": "eq",
...     "input": "{{sample.output_text}}", "reference": "{{item.answer}}",
... })
>>> [grade] = asyncio.run(grade_all(build(spec), [(Sample("42"), {"answer": 42})]))
>>> grade.score, grade.reason
(1.0, "expected '42', got '42'")
"""
