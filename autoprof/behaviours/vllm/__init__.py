"""vLLM: engines, workers, API server."""
