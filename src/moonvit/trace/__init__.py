"""Stages of the tower recorded, compared with another program's, and its mistakes named."""

from moonvit.trace.record import record, statistics, write_trace

__all__ = ["record", "statistics", "write_trace"]
