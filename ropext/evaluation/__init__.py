"""Run a measurement: line up models, documents and questions, and run the forward passes."""
