"""Ranks come and go: the ranks of a group that are left, processes that join, and the group that they form."""
