"""System-call filters: our profile, its compiled forms, and administrators' own profiles."""

from pathlib import Path

PROFILES = Path(__file__).parent  # guest.json, and for each machine its compiled form: guest.x86_64.bpf
