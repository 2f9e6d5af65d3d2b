"""The published suites: conformance (the contract of a backend) and escape (attacks), for your backend too."""
