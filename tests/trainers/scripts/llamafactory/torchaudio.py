"""In place of torchaudio, which LLaMA-Factory imports for sound alone."""
