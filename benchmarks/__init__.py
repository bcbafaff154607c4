"""Workloads, runners and reports."""
