"""The data that client and service exchange: bodies of requests and answers, and records."""
