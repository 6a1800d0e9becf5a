"""Stand-in for torchaudio, which LLaMA-Factory imports only for sound."""
