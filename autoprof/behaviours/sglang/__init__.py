"""SGLang: engines, schedulers, API server."""
