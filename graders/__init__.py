"""Specs in, grades out. A leaf: no database, no web server, no torch, usable on its own.

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
