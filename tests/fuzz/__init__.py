"""A harness that keeps looking for defects: random cases of six kinds, each determined by its kind and a seed.

`python -m tests.fuzz` runs all kinds for a while, `python -m tests.fuzz maths 123456` runs one case again.
"""
