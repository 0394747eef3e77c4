"""A real browser for each test."""

from tests.support.browser import browser

__all__ = ["browser"]
