"""Thalweg: a streaming-ingestion engine whose source moves only after one durable primary raw write."""

__version__ = "0.1.0"
