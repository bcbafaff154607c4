"""Calibration of survival estimates and measured latencies."""
