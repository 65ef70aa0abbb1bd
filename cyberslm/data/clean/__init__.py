"""Cleaning: named steps over the entries of a corpus, each a pure map with counts (``pipeline``, ``config``).

In doubt a step keeps a document: text of this domain is odd, and what looks strange may be the evidence.
"""
