"""What client and service both speak: the bodies of requests and answers, and the records."""
