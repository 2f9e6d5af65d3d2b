"""Metrics, samples, alerts and log lines."""
