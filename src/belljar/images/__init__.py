"""Container images: pull policy, lock, signatures, scans, builds."""
