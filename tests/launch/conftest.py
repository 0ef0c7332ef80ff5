"""Fixtures of the tests of jobs: two hosts."""

from two_hosts import hosts

__all__ = ["hosts"]
